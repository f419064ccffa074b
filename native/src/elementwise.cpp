// Rotation, sums, scaling, rows of tables.
#include "loraplex/elementwise.h"

#include <algorithm>
#include <cstring>

#include "exponential.h"
#include "loraplex/guard.h"
#include "loraplex/simd.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

// Pairs (i, i + num_pairs) of each head.
template <typename T>
void rotate_halves(T *heads, std::int64_t num_heads, std::int64_t head_dim, std::int64_t num_pairs,
                   const float *cos, const float *sin) {
    for (std::int64_t head = 0; head < num_heads; ++head, heads += head_dim) {
        for_each_vector(num_pairs, [&](std::int64_t first, int count) {
            const Floats c = load_up_to(cos + first, count), s = load_up_to(sin + first, count);
            const Floats a = load_up_to(heads + first, count);
            const Floats b = load_up_to(heads + num_pairs + first, count);
            store_up_to(heads + first, subtract(multiply(a, c), multiply(b, s)), count);
            store_up_to(heads + num_pairs + first, add(multiply(b, c), multiply(a, s)), count);
        });
    }
}

// Pairs (2 i, 2 i + 1) of each head: (a, b) c + (b, a) (-s, s).
template <typename T>
void rotate_neighbours(T *heads, std::int64_t num_heads, std::int64_t head_dim,
                       std::int64_t num_pairs, const float *cos, const float *sin) {
    constexpr std::int64_t kMostPairs = 64;
    float cosines[2 * kMostPairs], sines[2 * kMostPairs];
    for (std::int64_t done = 0; done < num_pairs; done += kMostPairs) {
        const std::int64_t count = std::min(kMostPairs, num_pairs - done);
        for (std::int64_t i = 0; i < count; ++i) {
            cosines[2 * i] = cosines[2 * i + 1] = cos[done + i];
            sines[2 * i] = -sin[done + i];
            sines[2 * i + 1] = sin[done + i];
        }
        for (std::int64_t head = 0; head < num_heads; ++head) {
            T *elements = heads + head * head_dim + 2 * done;
            for_each_vector(2 * count, [&](std::int64_t first, int lanes) {
                const Floats x = load_up_to(elements + first, lanes);
                const Floats kept = multiply(x, load_up_to(cosines + first, lanes));
                const Floats turned =
                    multiply(swap_neighbours(x), load_up_to(sines + first, lanes));
                store_up_to(elements + first, add(kept, turned), lanes);
            });
        }
    }
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_rotary(loraplex_pool *pool, int64_t num_tokens, int64_t num_heads,
                                int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim,
                                int32_t is_interleaved, const float *cos, const float *sin,
                                loraplex_dtype dtype, void *query, int64_t query_stride, void *key,
                                int64_t key_stride) {
    using namespace loraplex;
    return guarded([&] {
        check(num_tokens >= 0 && num_heads >= 0 && num_kv_heads >= 0 && rotary_dim >= 2 &&
                  rotary_dim % 2 == 0 && rotary_dim <= head_dim,
              "rotary");
        const std::int64_t num_pairs = rotary_dim / 2;
        const std::int64_t token_elements = (num_heads + num_kv_heads) * rotary_dim;
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            const auto rotate = is_interleaved != 0 ? rotate_neighbours<T> : rotate_halves<T>;
            for_each_row(*pool, num_tokens, token_elements, [&](std::int64_t token) {
                const float *token_cos = cos + token * num_pairs;
                const float *token_sin = sin + token * num_pairs;
                rotate(static_cast<T *>(query) + token * query_stride, num_heads, head_dim,
                       num_pairs, token_cos, token_sin);
                rotate(static_cast<T *>(key) + token * key_stride, num_kv_heads, head_dim,
                       num_pairs, token_cos, token_sin);
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_add(loraplex_pool *pool, int64_t num_rows, int64_t n,
                             loraplex_dtype dtype, const void *x, int64_t x_stride,
                             const void *residual, int64_t residual_stride, float factor,
                             void *sum) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "add");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                add_rows(static_cast<const T *>(x) + row * x_stride,
                         static_cast<const T *>(residual) + row * residual_stride, n, factor,
                         static_cast<T *>(sum) + row * n);
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_multiply(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                  loraplex_dtype dtype, const void *x, int64_t x_stride,
                                  const void *factor, int64_t factor_stride, void *product) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "multiply");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                const T *from = static_cast<const T *>(x) + row * x_stride;
                const T *by = static_cast<const T *>(factor) + row * factor_stride;
                T *to = static_cast<T *>(product) + row * n;
                for_each_vector(n, [&](std::int64_t first, int count) {
                    const Floats value = multiply(load_up_to(from + first, count),
                                                  load_up_to(by + first, count));
                    store_up_to(to + first, value, count);
                });
            });
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_scale(loraplex_pool *pool, int64_t num_rows, int64_t n,
                               loraplex_dtype dtype, float factor, float soft_cap, void *x,
                               int64_t x_stride) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1 && soft_cap >= 0.0f, "scale");
        const bool is_capped = soft_cap > 0.0f;
        const Floats inner = broadcast(is_capped ? factor / soft_cap : factor);
        const Floats outer = broadcast(soft_cap);
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                T *elements = static_cast<T *>(x) + row * x_stride;
                for_each_vector(n, [&](std::int64_t first, int count) {
                    const Floats value = multiply(load_up_to(elements + first, count), inner);
                    store_up_to(elements + first,
                                is_capped ? multiply(tanh(value), outer) : value, count);
                });
            });
            return LORAPLEX_OK;
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
