// Gates of what layers give: with a norm, or alone.
#include <cmath>

#include "exponential.h"
#include "loraplex/guard.h"
#include "loraplex/recurrence.h"
#include "loraplex/simd.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

// The value after a rounding to T.
template <typename T>
inline Floats rounded(Floats value) {
    T lanes[kLanes];
    store(lanes, value);
    return load(lanes);
}

// x * sigmoid(x)
inline Floats silu(Floats x) { return multiply(x, sigmoid(x)); }

template <typename T>
void gated_norm(const T *x, const T *gate, const T *weight, std::int64_t n, float eps,
                bool is_gated_first, T *output) {
    const auto input = [&](std::int64_t first, int count) {
        const Floats value = load_up_to(x + first, count);
        return is_gated_first ? multiply(value, silu(load_up_to(gate + first, count))) : value;
    };
    Floats squares = zeros();
    for_each_vector(n, [&](std::int64_t first, int count) {
        const Floats value = input(first, count);
        squares = multiply_add(value, value, squares);
    });
    const float mean = sum_lanes(squares) / static_cast<float>(n);
    const Floats factor = broadcast(1.0f / std::sqrt(mean + eps));
    for_each_vector(n, [&](std::int64_t first, int count) {
        const Floats normed = rounded<T>(multiply(input(first, count), factor));
        Floats scaled = multiply(normed, load_up_to(weight + first, count));
        if (!is_gated_first) {
            scaled = multiply(rounded<T>(scaled), silu(load_up_to(gate + first, count)));
        }
        store_up_to(output + first, scaled, count);
    });
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_gated_rms_norm(
    loraplex_pool *pool, int64_t num_outer, int64_t num_inner, int64_t n, loraplex_dtype dtype,
    const void *x, int64_t outer_stride, int64_t inner_stride, const void *gate,
    int64_t gate_outer_stride, int64_t gate_inner_stride, const void *weight,
    int64_t weight_stride, float eps, int32_t is_gated_first, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_outer >= 0 && num_inner >= 1 && n >= 1, "gated_rms_norm");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_outer, num_inner * n, [&](std::int64_t outer) {
                for (std::int64_t inner = 0; inner < num_inner; ++inner) {
                    gated_norm(static_cast<const T *>(x) + outer * outer_stride +
                                   inner * inner_stride,
                               static_cast<const T *>(gate) + outer * gate_outer_stride +
                                   inner * gate_inner_stride,
                               static_cast<const T *>(weight) + inner * weight_stride, n, eps,
                               is_gated_first != 0,
                               static_cast<T *>(output) + (outer * num_inner + inner) * n);
                }
            });
            return loraplex_status{LORAPLEX_OK};
        });
    });
}

loraplex_status loraplex_sigmoid_gate(loraplex_pool *pool, int64_t num_outer, int64_t num_inner,
                                      int64_t n, loraplex_dtype dtype, const void *x,
                                      int64_t outer_stride, int64_t inner_stride,
                                      const void *gate, int64_t gate_outer_stride,
                                      int64_t gate_inner_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_outer >= 0 && num_inner >= 1 && n >= 1, "sigmoid_gate");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_outer, num_inner * n, [&](std::int64_t outer) {
                for (std::int64_t inner = 0; inner < num_inner; ++inner) {
                    const T *from =
                        static_cast<const T *>(x) + outer * outer_stride + inner * inner_stride;
                    const T *gates = static_cast<const T *>(gate) + outer * gate_outer_stride +
                                     inner * gate_inner_stride;
                    T *to = static_cast<T *>(output) + (outer * num_inner + inner) * n;
                    for_each_vector(n, [&](std::int64_t first, int count) {
                        const Floats factor =
                            rounded<T>(sigmoid(load_up_to(gates + first, count)));
                        store_up_to(to + first,
                                    multiply(load_up_to(from + first, count), factor), count);
                    });
                }
            });
            return loraplex_status{LORAPLEX_OK};
        });
    });
}
