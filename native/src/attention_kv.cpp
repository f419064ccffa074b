// Writes keys and values where attention reads them.
#include "loraplex/attention.h"

#include <algorithm>
#include <stdexcept>

#include "block_product.h"
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

    // Elements before a head's part of the block that holds the slot.
    std::int64_t head_start(std::int64_t slot, std::int64_t head) const {
        return (slot / block_size * num_heads + head) * head_dim * block_size;
    }
};

template <typename KV, typename T>
void write_key(const KVShape &shape, std::int64_t slot, const T *source, KV *keys) {
    for (std::int64_t head = 0; head < shape.num_heads; ++head, source += shape.head_dim) {
        KV *target = keys + shape.head_start(slot, head) + slot % shape.block_size;
        for (std::int64_t d = 0; d < shape.head_dim; ++d) {
            target[d * shape.block_size] = narrow<KV>(widen(source[d]));
        }
    }
}

template <typename KV, typename T>
void write_value(const KVShape &shape, std::int64_t slot, const T *source, KV *values) {
    for (std::int64_t head = 0; head < shape.num_heads; ++head, source += shape.head_dim) {
        KV *target = values + shape.head_start(slot, head) +
                     slot % shape.block_size * shape.head_dim;
        for (std::int64_t d = 0; d < shape.head_dim; ++d) {
            target[d] = narrow<KV>(widen(source[d]));
        }
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
            return for_dtype(kv_dtype, [&](auto kv_element) {
                using T = decltype(element);
                using KV = decltype(kv_element);
                for_each_row(*pool, num_tokens, 4 * num_kv_heads * head_dim, [&](auto token) {
                    write_key(shape, slot_mapping[token],
                              static_cast<const T *>(key) + token * key_stride,
                              static_cast<KV *>(keys));
                    write_value(shape, slot_mapping[token],
                                static_cast<const T *>(value) + token * value_stride,
                                static_cast<KV *>(values));
                });
                return LORAPLEX_OK;
            });
        });
    });
}
