// The sum of a token's experts.
#include "loraplex/experts.h"

#include "exponential.h"
#include "loraplex/guard.h"
#include "loraplex/simd.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

template <typename T>
struct Rows {
    const T *data;  // null: none
    std::int64_t stride;

    const T *row(std::int64_t index) const {
        return data == nullptr ? nullptr : data + index * stride;
    }
};

Floats sigmoid(Floats x) {
    const Floats exponential = exp2(multiply(x, broadcast(-kLog2E)));
    return divide(broadcast(1.0f), add(broadcast(1.0f), exponential));
}

// y: the rows of one token's pairs.
template <typename T>
void combine(std::int64_t num_chosen, std::int64_t n, const float *weights, Rows<T> y,
             const T *shared, const T *shared_gate, T *output) {
    const Floats factor = shared_gate == nullptr ? broadcast(1.0f)
                                                 : sigmoid(broadcast(widen(shared_gate[0])));
    for_each_vector(n, [&](std::int64_t first, int count) {
        Floats sum = multiply(broadcast(weights[0]), load_up_to(y.data + first, count));
        for (std::int64_t choice = 1; choice < num_chosen; ++choice) {
            sum = multiply_add(broadcast(weights[choice]),
                               load_up_to(y.row(choice) + first, count), sum);
        }
        if (shared != nullptr) {
            sum = multiply_add(factor, load_up_to(shared + first, count), sum);
        }
        store_up_to(output + first, sum, count);
    });
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_combine_experts(loraplex_pool *pool, int64_t num_tokens,
                                         int64_t num_chosen, int64_t n, loraplex_dtype dtype,
                                         const float *weights, const void *y, int64_t y_stride,
                                         const void *shared, int64_t shared_stride,
                                         const void *shared_gate, int64_t shared_gate_stride,
                                         void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_tokens >= 0 && num_chosen >= 1 && n >= 1, "combine_experts");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            const Rows<T> experts = {static_cast<const T *>(y), y_stride};
            const Rows<T> added = {static_cast<const T *>(shared), shared_stride};
            const Rows<T> gates = {static_cast<const T *>(shared_gate), shared_gate_stride};
            for_each_row(*pool, num_tokens, num_chosen * n, [&](std::int64_t token) {
                const std::int64_t first = token * num_chosen;
                combine(num_chosen, n, weights + first,
                        Rows<T>{experts.row(first), y_stride}, added.row(token),
                        gates.row(token), static_cast<T *>(output) + token * n);
            });
            return LORAPLEX_OK;
        });
    });
}
