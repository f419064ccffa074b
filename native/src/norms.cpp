// Norms of rows, alone or of the sum with another row.
#include <cmath>

#include "loraplex/elementwise.h"
#include "loraplex/guard.h"
#include "loraplex/simd.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

// Four chains per lane, so that long rows do not wait for one addition after another.
template <typename T>
float sum_of_squares(const T *row, std::int64_t n) {
    Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
    std::int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
        for (int chain = 0; chain < 4; ++chain) {
            const Floats value = load(row + i + chain * kLanes);
            sums[chain] = multiply_add(value, value, sums[chain]);
        }
    }
    for_each_vector(n - i, [&](std::int64_t first, int count) {
        const Floats value = load_up_to(row + i + first, count);
        sums[0] = multiply_add(value, value, sums[0]);
    });
    return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <typename T, typename W>
void normalize(const T *row, const W *weight, std::int64_t n, float eps, T *output) {
    const float mean = sum_of_squares(row, n) / static_cast<float>(n);
    const Floats factor = broadcast(1.0f / std::sqrt(mean + eps));
    for_each_vector(n, [&](std::int64_t first, int count) {
        const Floats value = multiply(load_up_to(row + first, count), factor);
        const Floats scaled = multiply(value, load_up_to(weight + first, count));
        store_up_to(output + first, scaled, count);
    });
}

// The first `count` lanes have the value, the others 0.
inline Floats broadcast_up_to(float value, int count) {
    if (count == kLanes) {
        return broadcast(value);
    }
    float lanes[kLanes] = {};
    for (int lane = 0; lane < count; ++lane) {
        lanes[lane] = value;
    }
    return load(lanes);
}

// Of term(first, count), which is 0 in the lanes beyond count. As many chains as sum_of_squares.
template <typename Term>
float sum_of(std::int64_t n, const Term &term) {
    Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
    std::int64_t chain = 0;
    for_each_vector(n, [&](std::int64_t first, int count) {
        sums[chain] = add(sums[chain], term(first, count));
        chain = (chain + 1) % 4;
    });
    return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// The variance is that of the centred values: no two large numbers are subtracted.
template <typename T, typename W>
void standardize(const T *row, const W *weight, const W *bias, std::int64_t n, float eps,
                 T *output) {
    const float size = static_cast<float>(n);
    const float mean =
        sum_of(n, [&](std::int64_t first, int count) { return load_up_to(row + first, count); }) /
        size;
    const auto centered = [&](std::int64_t first, int count) {
        return subtract(load_up_to(row + first, count), broadcast_up_to(mean, count));
    };
    const float variance = sum_of(n, [&](std::int64_t first, int count) {
                               const Floats value = centered(first, count);
                               return multiply(value, value);
                           }) /
                           size;
    const Floats factor = broadcast(1.0f / std::sqrt(variance + eps));
    for_each_vector(n, [&](std::int64_t first, int count) {
        const Floats scaled =
            multiply(multiply(centered(first, count), factor), load_up_to(weight + first, count));
        store_up_to(output + first, add(scaled, load_up_to(bias + first, count)), count);
    });
}

// body(T{}, W{}) with the types of the elements and of the weight: float32, or that of the elements.
template <typename Body>
loraplex_status for_weight_dtype(loraplex_dtype dtype, loraplex_dtype weight_dtype,
                                 const Body &body) {
    return for_dtype(dtype, [&](auto element) {
        if (weight_dtype == dtype) {
            return body(element, element);
        }
        return weight_dtype == LORAPLEX_FLOAT32 ? body(element, float{})
                                                : loraplex_status{LORAPLEX_INVALID_ARGUMENT};
    });
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_rms_norm(loraplex_pool *pool, int64_t num_outer, int64_t num_inner,
                                  int64_t n, loraplex_dtype dtype, const void *x,
                                  int64_t outer_stride, int64_t inner_stride,
                                  loraplex_dtype weight_dtype, const void *weight, float eps,
                                  void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_outer >= 0 && num_inner >= 1 && n >= 1, "rms_norm");
        return for_weight_dtype(dtype, weight_dtype, [&](auto element, auto weight_element) {
            using T = decltype(element);
            using W = decltype(weight_element);
            for_each_row(*pool, num_outer, num_inner * n, [&](std::int64_t outer) {
                for (std::int64_t inner = 0; inner < num_inner; ++inner) {
                    normalize(
                        static_cast<const T *>(x) + outer * outer_stride + inner * inner_stride,
                        static_cast<const W *>(weight), n, eps,
                        static_cast<T *>(output) + (outer * num_inner + inner) * n);
                }
            });
            return loraplex_status{LORAPLEX_OK};
        });
    });
}

loraplex_status loraplex_add_rms_norm(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                      loraplex_dtype dtype, const void *x, int64_t x_stride,
                                      const void *residual, int64_t residual_stride, float factor,
                                      loraplex_dtype weight_dtype, const void *weight, float eps,
                                      void *output, void *sum) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "add_rms_norm");
        return for_weight_dtype(dtype, weight_dtype, [&](auto element, auto weight_element) {
            using T = decltype(element);
            using W = decltype(weight_element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                T *sum_row = static_cast<T *>(sum) + row * n;
                add_rows(static_cast<const T *>(x) + row * x_stride,
                         static_cast<const T *>(residual) + row * residual_stride, n, factor,
                         sum_row);
                normalize(sum_row, static_cast<const W *>(weight), n, eps,
                          static_cast<T *>(output) + row * n);
            });
            return loraplex_status{LORAPLEX_OK};
        });
    });
}

loraplex_status loraplex_layer_norm(loraplex_pool *pool, int64_t num_outer, int64_t num_inner,
                                    int64_t n, loraplex_dtype dtype, const void *x,
                                    int64_t outer_stride, int64_t inner_stride,
                                    loraplex_dtype weight_dtype, const void *weight,
                                    const void *bias, int64_t weight_stride, float eps,
                                    void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_outer >= 0 && num_inner >= 1 && n >= 1, "layer_norm");
        return for_weight_dtype(dtype, weight_dtype, [&](auto element, auto weight_element) {
            using T = decltype(element);
            using W = decltype(weight_element);
            for_each_row(*pool, num_outer, num_inner * n, [&](std::int64_t outer) {
                for (std::int64_t inner = 0; inner < num_inner; ++inner) {
                    standardize(
                        static_cast<const T *>(x) + outer * outer_stride + inner * inner_stride,
                        static_cast<const W *>(weight) + inner * weight_stride,
                        static_cast<const W *>(bias) + inner * weight_stride, n, eps,
                        static_cast<T *>(output) + (outer * num_inner + inner) * n);
                }
            });
            return loraplex_status{LORAPLEX_OK};
        });
    });
}

loraplex_status loraplex_add_layer_norm(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                        loraplex_dtype dtype, const void *x, int64_t x_stride,
                                        const void *residual, int64_t residual_stride,
                                        float factor, loraplex_dtype weight_dtype,
                                        const void *weight, const void *bias, float eps,
                                        void *output, void *sum) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "add_layer_norm");
        return for_weight_dtype(dtype, weight_dtype, [&](auto element, auto weight_element) {
            using T = decltype(element);
            using W = decltype(weight_element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                T *sum_row = static_cast<T *>(sum) + row * n;
                add_rows(static_cast<const T *>(x) + row * x_stride,
                         static_cast<const T *>(residual) + row * residual_stride, n, factor,
                         sum_row);
                standardize(sum_row, static_cast<const W *>(weight), static_cast<const W *>(bias),
                            n, eps, static_cast<T *>(output) + row * n);
            });
            return loraplex_status{LORAPLEX_OK};
        });
    });
}
