// The gated delta rule: how its keys, queries, gates and values are made for the recurrence.
#include <cmath>

#include "loraplex/guard.h"
#include "loraplex/recurrence.h"
#include "recurrence.h"
#include "row_vectors.h"

namespace loraplex {
namespace {

inline constexpr float kLengthFloor = 1e-6f;

template <typename T>
class DeltaInputs {
public:
    static constexpr bool kHasStrength = true;

    DeltaInputs(const RecurrenceSizes &sizes, const T *qkv, std::int64_t qkv_stride, const T *b,
                std::int64_t b_stride, const T *a, std::int64_t a_stride, const float *a_log,
                const float *dt_bias, T *output)
        : sizes_(sizes),
          qkv_(qkv),
          qkv_stride_(qkv_stride),
          b_(b),
          b_stride_(b_stride),
          a_(a),
          a_stride_(a_stride),
          a_log_(a_log),
          dt_bias_(dt_bias),
          output_(output) {}

    void read_keys(std::int64_t head, std::int64_t first, std::int64_t count, float *pairs) const {
        const std::int64_t size = sizes_.key_size;
        const float query_factor = 1.0f / std::sqrt(static_cast<float>(size));
        for (std::int64_t t = 0; t < count; ++t) {
            const T *query = qkv_ + (first + t) * qkv_stride_ + head * size;
            normalize(query + sizes_.num_keys * size, 1.0f, pairs + 2 * t * size);
            normalize(query, query_factor, pairs + (2 * t + 1) * size);
        }
    }

    void read_gates(std::int64_t head, std::int64_t first, std::int64_t count, float *decays,
                    float *strengths) const {
        const Floats rate = broadcast(-std::exp(a_log_[head]));
        const Floats bias = broadcast(dt_bias_[head]);
        for_each_vector(count, [&](std::int64_t begin, int lanes) {
            float a[kLanes] = {};
            T b[kLanes] = {};
            for (int lane = 0; lane < lanes; ++lane) {
                const std::int64_t token = first + begin + lane;
                a[lane] = widen(a_[token * a_stride_ + head]);
                b[lane] = b_[token * b_stride_ + head];
            }
            store_up_to(decays + begin, multiply(rate, softplus(add(load(a), bias))), lanes);
            // Rounded to the model's type, as its layers do.
            store(b, sigmoid(load(b)));
            store_up_to(strengths + begin, load(b), lanes);
        });
    }

    void read_value(std::int64_t head, std::int64_t token, float *value) const {
        const T *from = qkv_ + token * qkv_stride_ + 2 * sizes_.num_keys * sizes_.key_size +
                        head * sizes_.value_size;
        for_each_vector(sizes_.value_size, [&](std::int64_t first, int count) {
            store_up_to(value + first, load_up_to(from + first, count), count);
        });
    }

    void write_output(std::int64_t head, std::int64_t token, const float *read) const {
        T *to = output_ + (token * sizes_.num_values + head) * sizes_.value_size;
        for_each_vector(sizes_.value_size, [&](std::int64_t first, int count) {
            store_up_to(to + first, load_up_to(read + first, count), count);
        });
    }

private:
    void normalize(const T *from, float factor, float *to) const {
        Floats squares = zeros();
        for_each_vector(sizes_.key_size, [&](std::int64_t first, int count) {
            const Floats value = load_up_to(from + first, count);
            squares = multiply_add(value, value, squares);
        });
        const Floats scale = broadcast(factor / std::sqrt(sum_lanes(squares) + kLengthFloor));
        for_each_vector(sizes_.key_size, [&](std::int64_t first, int count) {
            store_up_to(to + first, multiply(load_up_to(from + first, count), scale), count);
        });
    }

    const RecurrenceSizes sizes_;
    const T *qkv_;
    std::int64_t qkv_stride_;
    const T *b_;
    std::int64_t b_stride_;
    const T *a_;
    std::int64_t a_stride_;
    const float *a_log_;
    const float *dt_bias_;
    T *output_;
};

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_delta_rule(
    loraplex_pool *pool, int64_t num_tokens, int64_t num_rows, int64_t num_keys,
    int64_t num_values, int64_t key_size, int64_t value_size, int64_t every, int64_t block_size,
    loraplex_dtype dtype, const void *qkv, int64_t qkv_stride, const void *b, int64_t b_stride,
    const void *a, int64_t a_stride, const float *a_log, const float *dt_bias,
    const int64_t *query_start_loc, const int64_t *positions, const int64_t *reads,
    const int64_t *writes, const int64_t *places, const int64_t *table_starts,
    const int64_t *tables, float *keys, float *values, float *sums, float *states, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_tokens >= 0 && num_rows >= 0 && num_keys >= 1 && num_values % num_keys == 0 &&
                  key_size >= 1 && value_size >= 1 && block_size >= 1 && every % block_size == 0,
              "delta_rule");
        const RecurrenceSizes sizes{num_keys, num_values, key_size, value_size, every, block_size};
        const StateRows rows{num_tokens, num_rows, query_start_loc, positions, reads,
                             writes,     places,   table_starts,    tables};
        const RecurrenceStorage storage{keys, values, sums, states};
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            const DeltaInputs<T> inputs(sizes, static_cast<const T *>(qkv), qkv_stride,
                                        static_cast<const T *>(b), b_stride,
                                        static_cast<const T *>(a), a_stride, a_log, dt_bias,
                                        static_cast<T *>(output));
            run_recurrence(*pool, sizes, rows, storage, inputs);
            clear_padding(rows, num_values * value_size, static_cast<T *>(output));
            return loraplex_status{LORAPLEX_OK};
        });
    });
}
