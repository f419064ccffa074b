#include "packed_weight.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "loraplex/guard.h"
#include "loraplex/pool.h"

namespace loraplex {
namespace {

// Sizes whose product cannot overflow, and groups that a kernel takes. Int4 has whole groups.
bool are_valid(loraplex_weight_kind kind, std::int64_t group_size, std::int64_t num_blocks,
               std::int64_t out_features, std::int64_t in_features) {
    constexpr std::int64_t kLargest = std::int64_t{1} << 28;
    return out_features > 0 && in_features > 0 && out_features <= kLargest &&
           in_features <= kLargest && are_blocks(num_blocks, in_features) &&
           is_group_size(kind, group_size) &&
           (kind != LORAPLEX_WEIGHT_INT4 || in_features / num_blocks % group_size == 0);
}

// What pack_weight is given: a row-major matrix, int8_t for quantised kinds.
template <typename W>
using Source = std::conditional_t<kIsQuantized<W>, std::int8_t, W>;

template <typename T>
struct Rows {
    const T *data;
    std::int64_t stride;

    const T *row(std::int64_t index) const { return data + index * stride; }
};

template <typename W>
void put(W *panel, std::int64_t output, std::int64_t input, Source<W> value) {
    constexpr std::int64_t kDepth = kInterleaved<W>;
    W *group = panel + input / kDepth * kDepth * kInputSize<W>;
    if constexpr (std::is_same_v<W, Int4>) {
        const std::int64_t bits = input % kDepth / 2 * 4;
        W *word = group + (output * 2 + input % 2) * 2;
        word[bits / 8].two_values |= static_cast<std::uint8_t>((value & 0xf) << bits % 8);
    } else {
        group[output * kDepth + input % kDepth] = W{value};
    }
}

// Of memory not yet written: a kernel that reads it looks up fewer pages. It is only a wish.
void ask_for_large_pages([[maybe_unused]] void *memory, [[maybe_unused]] std::int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t kLargePage = std::uintptr_t{1} << 21;
    const auto start = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t first = (start + kLargePage - 1) / kLargePage * kLargePage;
    const std::uintptr_t end =
        (start + static_cast<std::uintptr_t>(num_bytes)) / kLargePage * kLargePage;
    if (first < end) {
        madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
    }
#endif
}

// One output's inputs and scales of one block.
template <typename W>
void pack_block(const Source<W> *row, const float *scales, std::int64_t output,
                const PanelLayout<W> &layout, W *target) {
    for (std::int64_t input = 0; input < layout.block_inputs(); ++input) {
        put(target, output, input, row[input]);
    }
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        W *scale = target + layout.values_size() +
                   (group * kPanelWidth + output) * static_cast<int>(sizeof(float));
        std::memcpy(scale, scales + group, sizeof(float));
    }
}

template <typename W>
void pack(loraplex_pool &pool, Rows<Source<W>> weight, Rows<float> scales,
          std::int64_t out_features, const PanelLayout<W> &layout, W *packed) {
    const Op op(pool);
    pool.parallel_for_tiles(num_panels(out_features), [&](std::int64_t index, int) {
        W *panel = packed + index * layout.stride();
        std::fill_n(panel, layout.stride(), W{});
        const std::int64_t first = index * kPanelWidth;
        const std::int64_t num_outputs =
            std::clamp<std::int64_t>(out_features - first, 0, kPanelWidth);
        for (std::int64_t block = 0; block < layout.num_blocks(); ++block) {
            W *target = panel + block * layout.block_stride();
            for (std::int64_t output = 0; output < num_outputs; ++output) {
                pack_block(weight.row(first + output) + block * layout.block_inputs(),
                           scales.row(first + output) + block * layout.num_groups(), output,
                           layout, target);
            }
        }
    });
}

}  // namespace
}  // namespace loraplex

int64_t loraplex_packed_weight_bytes(loraplex_weight_kind kind, int64_t group_size,
                                     int64_t num_blocks, int64_t out_features,
                                     int64_t in_features) {
    using namespace loraplex;
    std::int64_t num_bytes = 0;
    if (are_valid(kind, group_size, num_blocks, out_features, in_features)) {
        for_weight_kind(kind, [&]<typename W>(W) {
            const PanelLayout<W> layout(in_features, num_blocks, group_size);
            num_bytes = num_panels(out_features) * layout.stride() *
                        static_cast<std::int64_t>(sizeof(W));
            return LORAPLEX_OK;
        });
    }
    return num_bytes;
}

loraplex_status loraplex_pack_weight(loraplex_pool *pool, loraplex_weight_kind kind,
                                     int64_t group_size, int64_t num_blocks, const void *weight,
                                     int64_t weight_stride, const float *scales,
                                     int64_t scales_stride, int64_t out_features,
                                     int64_t in_features, void *packed) {
    using namespace loraplex;
    if (!are_valid(kind, group_size, num_blocks, out_features, in_features)) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    return guarded([&] {
        ask_for_large_pages(packed, loraplex_packed_weight_bytes(kind, group_size, num_blocks,
                                                                 out_features, in_features));
        return for_weight_kind(kind, [&]<typename W>(W) {
            pack<W>(*pool, {static_cast<const Source<W> *>(weight), weight_stride},
                    {scales, scales_stride}, out_features,
                    PanelLayout<W>(in_features, num_blocks, group_size), static_cast<W *>(packed));
            return LORAPLEX_OK;
        });
    });
}
