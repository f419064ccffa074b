// The state space of Mamba2: how its keys, queries, decays and values are made for the recurrence.
#include <algorithm>

#include "exponential.h"
#include "loraplex/guard.h"
#include "loraplex/recurrence.h"
#include "recurrence.h"
#include "row_vectors.h"

namespace loraplex {
namespace {

struct SsmGates {
    const float *rate;
    const float *dt_bias;
    const float *skip;
    float smallest_step;
    float largest_step;

    // In this order NaN comes through on every instruction set.
    Floats steps(Floats dt, std::int64_t head) const {
        const Floats raw = softplus(add(dt, broadcast(dt_bias[head])));
        return minimum(broadcast(largest_step), maximum(broadcast(smallest_step), raw));
    }
};

template <typename T>
class SsmInputs {
public:
    static constexpr bool kHasStrength = false;

    SsmInputs(const RecurrenceSizes &sizes, const SsmGates &gates, const T *xbc,
              std::int64_t xbc_stride, const T *dt, std::int64_t dt_stride, T *output)
        : sizes_(sizes),
          gates_(gates),
          xbc_(xbc),
          xbc_stride_(xbc_stride),
          dt_(dt),
          dt_stride_(dt_stride),
          output_(output) {}

    void read_keys(std::int64_t group, std::int64_t first, std::int64_t count,
                   float *pairs) const {
        const std::int64_t size = sizes_.key_size;
        for (std::int64_t t = 0; t < count; ++t) {
            const T *b = xbc_ + (first + t) * xbc_stride_ + sizes_.num_values * sizes_.value_size +
                         group * size;
            widen_row(b, size, pairs + 2 * t * size);
            widen_row(b + sizes_.num_keys * size, size, pairs + (2 * t + 1) * size);
        }
    }

    void read_gates(std::int64_t head, std::int64_t first, std::int64_t count, float *decays,
                    float * /*strengths*/) const {
        const Floats rate = broadcast(gates_.rate[head]);
        for_each_vector(count, [&](std::int64_t begin, int lanes) {
            float dt[kLanes] = {};
            for (int lane = 0; lane < lanes; ++lane) {
                dt[lane] = widen(dt_[(first + begin + lane) * dt_stride_ + head]);
            }
            store_up_to(decays + begin, multiply(rate, gates_.steps(load(dt), head)), lanes);
        });
    }

    void read_value(std::int64_t head, std::int64_t token, float *value) const {
        const Floats step = gates_.steps(broadcast(widen(dt_[token * dt_stride_ + head])), head);
        const T *x = x_of(head, token);
        for_each_vector(sizes_.value_size, [&](std::int64_t first, int count) {
            store_up_to(value + first, multiply(step, load_up_to(x + first, count)), count);
        });
    }

    void write_output(std::int64_t head, std::int64_t token, const float *read) const {
        const T *x = x_of(head, token);
        const Floats skip = broadcast(gates_.skip[head]);
        T *to = output_ + (token * sizes_.num_values + head) * sizes_.value_size;
        for_each_vector(sizes_.value_size, [&](std::int64_t first, int count) {
            const Floats sum =
                multiply_add(load_up_to(x + first, count), skip, load_up_to(read + first, count));
            store_up_to(to + first, sum, count);
        });
    }

private:
    const T *x_of(std::int64_t head, std::int64_t token) const {
        return xbc_ + token * xbc_stride_ + head * sizes_.value_size;
    }

    static void widen_row(const T *from, std::int64_t n, float *to) {
        for_each_vector(n, [&](std::int64_t first, int count) {
            store_up_to(to + first, load_up_to(from + first, count), count);
        });
    }

    const RecurrenceSizes sizes_;
    const SsmGates gates_;
    const T *xbc_;
    std::int64_t xbc_stride_;
    const T *dt_;
    std::int64_t dt_stride_;
    T *output_;
};

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_ssd(
    loraplex_pool *pool, int64_t num_tokens, int64_t num_rows, int64_t num_heads,
    int64_t head_size, int64_t state_size, int64_t num_groups, int64_t every, int64_t block_size,
    loraplex_dtype dtype, const void *xbc, int64_t xbc_stride, const void *dt, int64_t dt_stride,
    const float *rate, const float *dt_bias, const float *skip, float smallest_step,
    float largest_step, const int64_t *query_start_loc, const int64_t *positions,
    const int64_t *reads, const int64_t *writes, const int64_t *places,
    const int64_t *table_starts, const int64_t *tables, float *keys, float *values, float *sums,
    float *states, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_tokens >= 0 && num_rows >= 0 && num_groups >= 1 && num_heads % num_groups == 0 &&
                  state_size >= 1 && head_size >= 1 && block_size >= 1 && every % block_size == 0,
              "ssd");
        const RecurrenceSizes sizes{num_groups, num_heads, state_size,
                                    head_size,  every,     block_size};
        const StateRows rows{num_tokens, num_rows, query_start_loc, positions, reads,
                             writes,     places,   table_starts,    tables};
        const RecurrenceStorage storage{keys, values, sums, states};
        const SsmGates gates{rate, dt_bias, skip, smallest_step, largest_step};
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            auto *result = static_cast<T *>(output);
            run_recurrence(*pool, sizes, rows, storage,
                           SsmInputs<T>(sizes, gates, static_cast<const T *>(xbc), xbc_stride,
                                        static_cast<const T *>(dt), dt_stride, result));
            clear_padding(rows, num_heads * head_size, result);
            return loraplex_status{LORAPLEX_OK};
        });
    });
}
