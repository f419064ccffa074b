#include "loraplex/elementwise.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "exponential.h"
#include "loraplex/guard.h"
#include "loraplex/simd.h"
#include "tiles.h"

namespace loraplex {
namespace {

// body(first, count) for kLanes neighbours at a time; the last time perhaps for fewer.
template <typename Body>
inline void for_each_vector(std::int64_t n, const Body &body) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        body(i, kLanes);
    }
    if (i < n) {
        body(i, static_cast<int>(n - i));
    }
}

template <typename T>
inline Floats load_up_to(const T *source, int count) {
    return count == kLanes ? load(source) : load_first(source, count);
}

template <typename T>
inline void store_up_to(T *target, Floats value, int count) {
    if (count == kLanes) {
        store(target, value);
    } else {
        store_first(target, value, count);
    }
}

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

template <typename T>
void normalize(const T *row, const T *weight, std::int64_t n, float eps, T *output) {
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
template <typename T>
void standardize(const T *row, const T *weight, const T *bias, std::int64_t n, float eps,
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

template <typename T>
void add_rows(const T *x, const T *residual, std::int64_t n, T *sum) {
    for_each_vector(n, [&](std::int64_t first, int count) {
        store_up_to(sum + first,
                    add(load_up_to(x + first, count), load_up_to(residual + first, count)), count);
    });
}

template <typename T>
void rotate_heads(T *heads, std::int64_t num_heads, std::int64_t half, const float *cos,
                  const float *sin) {
    for (std::int64_t head = 0; head < num_heads; ++head, heads += 2 * half) {
        for_each_vector(half, [&](std::int64_t first, int count) {
            const Floats c = load_up_to(cos + first, count), s = load_up_to(sin + first, count);
            const Floats a = load_up_to(heads + first, count);
            const Floats b = load_up_to(heads + half + first, count);
            store_up_to(heads + first, subtract(multiply(a, c), multiply(b, s)), count);
            store_up_to(heads + half + first, add(multiply(b, c), multiply(a, s)), count);
        });
    }
}

inline Floats silu(Floats x) {
    const Floats exponential = exp2(multiply(x, broadcast(-kLog2E)));
    return divide(x, add(broadcast(1.0f), exponential));
}

template <typename T>
void gate(const T *gate_up, std::int64_t n, T *output) {
    for_each_vector(n, [&](std::int64_t first, int count) {
        const Floats gated = silu(load_up_to(gate_up + first, count));
        store_up_to(output + first, multiply(gated, load_up_to(gate_up + n + first, count)),
                    count);
    });
}

inline Floats relu(Floats x) {
    // In this order NaN comes through on every instruction set.
    return maximum(zeros(), x);
}

// x / (1 + e^(-2 u)) = x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Floats gelu_tanh(Floats x) {
    const Floats cubic = multiply_add(multiply(x, x), broadcast(0.044715f), broadcast(1.0f));
    const Floats u = multiply(multiply(x, cubic), broadcast(-2.0f * 0.797884560802865356f));
    return divide(x, add(broadcast(1.0f), exp2(multiply(u, broadcast(kLog2E)))));
}

// erfc(z) for z in [0, 12], within 1e-6 of its value: e^(-z^2) t p(t), t = 1 / (1 + z / 2), where p
// is the polynomial nearest to erfc(z) e^(z^2) / t at Chebyshev's points.
inline Floats erfc(Floats z) {
    const Floats t = divide(broadcast(1.0f), multiply_add(z, broadcast(0.5f), broadcast(1.0f)));
    Floats series = broadcast(-6.01972491e-02f);
    series = multiply_add(series, t, broadcast(2.89869040e-01f));
    series = multiply_add(series, t, broadcast(-4.97684866e-01f));
    series = multiply_add(series, t, broadcast(2.89468139e-01f));
    series = multiply_add(series, t, broadcast(-3.40365209e-02f));
    series = multiply_add(series, t, broadcast(2.05621541e-01f));
    series = multiply_add(series, t, broadcast(2.42415696e-01f));
    series = multiply_add(series, t, broadcast(2.82462269e-01f));
    series = multiply_add(series, t, broadcast(2.82081902e-01f));
    const Floats power = exp2(multiply(multiply(z, z), broadcast(-kLog2E)));
    return multiply(multiply(power, t), series);
}

// x Phi(x) = max(x, 0) - |x| erfc(|x| / sqrt 2) / 2. Beyond 16 the second part is 0.
inline Floats gelu(Floats x) {
    const Floats magnitude = maximum(x, subtract(zeros(), x));
    const Floats limited = minimum(broadcast(16.0f), magnitude);
    const Floats tail = erfc(multiply(limited, broadcast(0.707106781186547524f)));
    return subtract(relu(x), multiply(multiply(limited, broadcast(0.5f)), tail));
}

// body(function of Floats) for an activation's number
template <typename Body>
loraplex_status for_activation(loraplex_activation activation, const Body &body) {
    switch (activation) {
        case LORAPLEX_GELU:
            body([](Floats x) { return gelu(x); });
            return LORAPLEX_OK;
        case LORAPLEX_GELU_TANH:
            body([](Floats x) { return gelu_tanh(x); });
            return LORAPLEX_OK;
        case LORAPLEX_RELU:
            body([](Floats x) { return relu(x); });
            return LORAPLEX_OK;
        default:
            return LORAPLEX_INVALID_ARGUMENT;
    }
}

void check(bool is_valid, const char *op) {
    if (!is_valid) {
        throw std::invalid_argument(op);
    }
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_rms_norm(loraplex_pool *pool, int64_t num_outer, int64_t num_inner,
                                  int64_t n, loraplex_dtype dtype, const void *x,
                                  int64_t outer_stride, int64_t inner_stride, const void *weight,
                                  float eps, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_outer >= 0 && num_inner >= 1 && n >= 1, "rms_norm");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_outer, num_inner * n, [&](std::int64_t outer) {
                for (std::int64_t inner = 0; inner < num_inner; ++inner) {
                    normalize(
                        static_cast<const T *>(x) + outer * outer_stride + inner * inner_stride,
                        static_cast<const T *>(weight), n, eps,
                        static_cast<T *>(output) + (outer * num_inner + inner) * n);
                }
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_add_rms_norm(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                      loraplex_dtype dtype, const void *x, int64_t x_stride,
                                      const void *residual, int64_t residual_stride,
                                      const void *weight, float eps, void *output, void *sum) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "add_rms_norm");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                T *sum_row = static_cast<T *>(sum) + row * n;
                add_rows(static_cast<const T *>(x) + row * x_stride,
                         static_cast<const T *>(residual) + row * residual_stride, n, sum_row);
                normalize(sum_row, static_cast<const T *>(weight), n, eps,
                          static_cast<T *>(output) + row * n);
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_layer_norm(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                    loraplex_dtype dtype, const void *x, int64_t x_stride,
                                    const void *weight, const void *bias, float eps,
                                    void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "layer_norm");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                standardize(static_cast<const T *>(x) + row * x_stride,
                            static_cast<const T *>(weight), static_cast<const T *>(bias), n, eps,
                            static_cast<T *>(output) + row * n);
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_add_layer_norm(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                        loraplex_dtype dtype, const void *x, int64_t x_stride,
                                        const void *residual, int64_t residual_stride,
                                        const void *weight, const void *bias, float eps,
                                        void *output, void *sum) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "add_layer_norm");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                T *sum_row = static_cast<T *>(sum) + row * n;
                add_rows(static_cast<const T *>(x) + row * x_stride,
                         static_cast<const T *>(residual) + row * residual_stride, n, sum_row);
                standardize(sum_row, static_cast<const T *>(weight), static_cast<const T *>(bias),
                            n, eps, static_cast<T *>(output) + row * n);
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_rotary(loraplex_pool *pool, int64_t num_tokens, int64_t num_heads,
                                int64_t num_kv_heads, int64_t head_dim, const float *cos,
                                const float *sin, loraplex_dtype dtype, void *query,
                                int64_t query_stride, void *key, int64_t key_stride) {
    using namespace loraplex;
    return guarded([&] {
        check(num_tokens >= 0 && num_heads >= 0 && num_kv_heads >= 0 && head_dim >= 2 &&
                  head_dim % 2 == 0,
              "rotary");
        const std::int64_t half = head_dim / 2;
        const std::int64_t token_elements = (num_heads + num_kv_heads) * head_dim;
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_tokens, token_elements, [&](std::int64_t token) {
                const float *token_cos = cos + token * half, *token_sin = sin + token * half;
                rotate_heads(static_cast<T *>(query) + token * query_stride, num_heads, half,
                             token_cos, token_sin);
                rotate_heads(static_cast<T *>(key) + token * key_stride, num_kv_heads, half,
                             token_cos, token_sin);
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_silu_mul(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                  loraplex_dtype dtype, const void *gate_up,
                                  int64_t gate_up_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "silu_mul");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                gate(static_cast<const T *>(gate_up) + row * gate_up_stride, n,
                     static_cast<T *>(output) + row * n);
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_activate(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                  loraplex_dtype dtype, loraplex_activation activation,
                                  const void *x, int64_t x_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "activate");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            return for_activation(activation, [&](const auto &function) {
                for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                    const T *from = static_cast<const T *>(x) + row * x_stride;
                    T *to = static_cast<T *>(output) + row * n;
                    for_each_vector(n, [&](std::int64_t first, int count) {
                        store_up_to(to + first, function(load_up_to(from + first, count)), count);
                    });
                });
            });
        });
    });
}

loraplex_status loraplex_take_rows(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                   loraplex_dtype dtype, const void *table, int64_t table_stride,
                                   const int64_t *indices, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "take_rows");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                std::memcpy(static_cast<T *>(output) + row * n,
                            static_cast<const T *>(table) + indices[row] * table_stride,
                            static_cast<std::size_t>(n) * sizeof(T));
            });
            return LORAPLEX_OK;
        });
    });
}
