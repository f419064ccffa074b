// Writes keys and values where attention reads them.
#include "loraplex/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "attention_storage.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "loraplex/simd.h"
#include "tiles.h"

namespace loraplex {
namespace {

struct KVShape {
    std::int64_t num_heads;
    std::int64_t head_dim;
    std::int64_t block_size;
};

template <typename T>
float largest_magnitude(const T *values, std::int64_t n) {
    std::uint32_t largest = 0;  // as bits, magnitudes are in order; infinity and NaN come last
    for (std::int64_t i = 0; i < n; ++i) {
        largest = std::max(largest, std::bit_cast<std::uint32_t>(widen(values[i])) & 0x7fffffffu);
    }
    return std::bit_cast<float>(largest);
}

// attention.h says which scale.
template <typename T>
float scale_of(const T *values, std::int64_t n) {
    const float largest = largest_magnitude(values, n);
    if (!std::isfinite(largest)) {
        return std::numeric_limits<float>::quiet_NaN();
    }
    const float scale = largest / 127.0f;
    return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

// One head of one token: element d goes to part[first + d * stride].
template <typename KV, typename T>
void write_head(const HeadPart<KV> &layout, std::int64_t offset, const T *source, KV *part,
                std::int64_t first, std::int64_t stride) {
    const std::int64_t dim = layout.head_dim;
    if constexpr (kHasScales<KV>) {
        const float scale = scale_of(source, dim);
        layout.set_scale(part, offset, scale);
        for (std::int64_t d = 0; d < dim; ++d) {
            const float number = scale > 0.0f ? std::nearbyint(widen(source[d]) / scale) : 0.0f;
            part[first + d * stride] = static_cast<KV>(number);
        }
    } else {
        for (std::int64_t d = 0; d < dim; ++d) {
            part[first + d * stride] = narrow<KV>(widen(source[d]));
        }
    }
}

// All heads of one token's key and value.
template <typename KV, typename T>
void write_token(const KVShape &shape, std::int64_t slot, const T *key, const T *value, KV *keys,
                 KV *values) {
    const HeadPart<KV> layout{shape.head_dim, shape.block_size};
    const std::int64_t dim = shape.head_dim, offset = slot % shape.block_size;
    for (std::int64_t head = 0; head < shape.num_heads; ++head) {
        const std::int64_t index = slot / shape.block_size * shape.num_heads + head;
        KV *key_part = keys + index * layout.num_elements();
        KV *value_part = values + index * layout.num_elements();
        write_head(layout, offset, key + head * dim, key_part, offset, shape.block_size);
        write_head(layout, offset, value + head * dim, value_part, offset * dim, 1);
    }
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_write_kv(loraplex_pool *pool, int64_t num_tokens, int64_t num_kv_heads,
                                  int64_t head_dim, int64_t block_size,
                                  const int64_t *slot_mapping, loraplex_dtype dtype,
                                  const void *key, int64_t key_stride, const void *value,
                                  int64_t value_stride, loraplex_dtype kv_dtype, void *keys,
                                  void *values) {
    using namespace loraplex;
    return guarded([&] {
        if (num_tokens < 0 || num_kv_heads < 1 || head_dim < 1 || block_size < 1) {
            throw std::invalid_argument("write_kv");
        }
        const KVShape shape{num_kv_heads, head_dim, block_size};
        return for_dtype(dtype, [&](auto element) {
            return for_kv_dtype(kv_dtype, [&](auto kv_element) {
                using T = decltype(element);
                using KV = decltype(kv_element);
                for_each_row(*pool, num_tokens, 4 * num_kv_heads * head_dim, [&](auto token) {
                    write_token(shape, slot_mapping[token],
                                static_cast<const T *>(key) + token * key_stride,
                                static_cast<const T *>(value) + token * value_stride,
                                static_cast<KV *>(keys), static_cast<KV *>(values));
                });
                return LORAPLEX_OK;
            });
        });
    });
}
