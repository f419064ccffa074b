// How keys and values lie in the blocks (attention.h), and the scales of those that are int8.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block_product.h"
#include "loraplex/dtype.h"

namespace loraplex {

template <typename KV>
inline constexpr bool kHasScales = std::is_same_v<KV, std::int8_t>;

template <typename KV>
struct PagedKeys {
    const KV *keys;    // [num_blocks, K] parts of [D, block_size]
    const KV *values;  // [num_blocks, K] parts of [block_size, D]
};

// What one head has of one block: elements, and behind them the scales if there are any.
template <typename KV>
struct HeadPart {
    std::int64_t head_dim;
    std::int64_t block_size;

    std::int64_t num_elements() const {
        const std::int64_t scale_elements = kHasScales<KV> ? sizeof(float) / sizeof(KV) : 0;
        return (head_dim + scale_elements) * block_size;
    }

    void set_scale(KV *part, std::int64_t offset, float scale) const {
        std::memcpy(part + head_dim * block_size + offset * sizeof(float), &scale, sizeof(float));
    }

    // Multiplies column i of the products by the scale of position offset + i.
    template <typename A>
    void scale_columns([[maybe_unused]] const KV *part, [[maybe_unused]] std::int64_t offset,
                       [[maybe_unused]] std::int64_t count, [[maybe_unused]] std::int64_t num_rows,
                       [[maybe_unused]] Matrix<A> products) const {
        if constexpr (kHasScales<KV>) {
            const KV *scales = part + head_dim * block_size + offset * sizeof(float);
            for (std::int64_t row = 0; row < num_rows; ++row) {
                A *target = products.row(row);
                for (std::int64_t i = 0; i < count; ++i) {
                    float scale;
                    std::memcpy(&scale, scales + i * sizeof(float), sizeof(float));
                    target[i] *= scale;
                }
            }
        }
    }
};

// for_dtype (dtype.h) of what may be stored.
template <typename Body>
loraplex_status for_kv_dtype(loraplex_dtype dtype, const Body &body) {
    return dtype == LORAPLEX_INT8 ? body(std::int8_t{}) : for_dtype(dtype, body);
}

}  // namespace loraplex
