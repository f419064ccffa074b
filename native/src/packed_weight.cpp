#include "packed_weight.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "loraplex/guard.h"
#include "loraplex/pool.h"

namespace loraplex {
namespace {

bool has_nibbles(loraplex_weight_kind kind) {
    bool result = false;
    for_weight_kind(kind, [&]<typename W>(W) {
        result = kHasNibbles<W>;
        return LORAPLEX_OK;
    });
    return result;
}

// Sizes whose product cannot overflow, and groups that a kernel takes. Nibbles have whole groups.
bool are_valid(loraplex_weight_kind kind, std::int64_t group_size, std::int64_t num_blocks,
               std::int64_t out_features, std::int64_t in_features) {
    constexpr std::int64_t kLargest = std::int64_t{1} << 28;
    return out_features > 0 && in_features > 0 && out_features <= kLargest &&
           in_features <= kLargest && are_blocks(num_blocks, in_features) &&
           is_group_size(kind, group_size) &&
           (!has_nibbles(kind) || in_features / num_blocks % group_size == 0);
}

bool are_entries(const std::int16_t *table, std::int64_t group_size) {
    const std::int64_t largest = (std::int64_t{1} << 16) / group_size - 1;
    return std::all_of(table, table + kTableEntries, [largest](std::int16_t entry) {
        return entry >= -largest && entry <= largest;
    });
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
    } else if constexpr (std::is_same_v<W, Table4>) {
        const std::int64_t place = output % 8 / 4 * 16 + output / 8 * 8 + output % 4 * 2;
        const std::int64_t bits = input % kDepth / 2 * 4;
        group[place + input % 2].two_values |= static_cast<std::uint8_t>((value & 0xf) << bits);
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

// One output's numbers of the groups of one block: target [groups][kPanelWidth] float32.
template <typename W>
void put_groups(const float *numbers, std::int64_t num_groups, std::int64_t output, W *target) {
    for (std::int64_t group = 0; group < num_groups; ++group) {
        std::memcpy(target + (group * kPanelWidth + output) * static_cast<int>(sizeof(float)),
                    numbers + group, sizeof(float));
    }
}

// One output's inputs of one block.
template <typename W>
void put_inputs(const Source<W> *row, std::int64_t output, const PanelLayout<W> &layout,
                W *target) {
    for (std::int64_t input = 0; input < layout.block_inputs(); ++input) {
        put(target, output, input, row[input]);
    }
}

void put_table(const std::int16_t *table, std::uint8_t *target) {
    for (std::int64_t i = 0; i < kTableEntries; ++i) {
        const auto bits = static_cast<std::uint16_t>(table[i]);
        target[i] = static_cast<std::uint8_t>(bits & 0xff);
        target[kTableEntries + i] = static_cast<std::uint8_t>(bits >> 8);
    }
}

template <typename W>
void pack(loraplex_pool &pool, Rows<Source<W>> weight, Rows<float> scales, Rows<float> offsets,
          const std::int16_t *table, std::int64_t out_features, const PanelLayout<W> &layout,
          W *packed) {
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
                const std::int64_t row = first + output;
                const std::int64_t first_group = block * layout.num_groups();
                put_inputs(weight.row(row) + block * layout.block_inputs(), output, layout, target);
                W *groups = target + layout.values_size();
                put_groups(scales.row(row) + first_group, layout.num_groups(), output, groups);
                if (layout.has_offsets()) {
                    put_groups(offsets.row(row) + first_group, layout.num_groups(), output,
                               groups + layout.scales_size());
                }
            }
            if constexpr (kTableSize<W> > 0) {
                put_table(table, const_cast<std::uint8_t *>(layout.table(panel, block)));
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
            const PanelLayout<W> layout(in_features, num_blocks, group_size, has_offsets(kind));
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
                                     int64_t scales_stride, const float *offsets,
                                     const int16_t *table, int64_t out_features,
                                     int64_t in_features, void *packed) {
    using namespace loraplex;
    if (!are_valid(kind, group_size, num_blocks, out_features, in_features) ||
        has_offsets(kind) != (offsets != nullptr) ||
        (kind == LORAPLEX_WEIGHT_TABLE4) != (table != nullptr) ||
        (table != nullptr && !are_entries(table, group_size))) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    return guarded([&] {
        ask_for_large_pages(packed, loraplex_packed_weight_bytes(kind, group_size, num_blocks,
                                                                 out_features, in_features));
        return for_weight_kind(kind, [&]<typename W>(W) {
            pack<W>(*pool, {static_cast<const Source<W> *>(weight), weight_stride},
                    {scales, scales_stride}, {offsets, scales_stride}, table, out_features,
                    PanelLayout<W>(in_features, num_blocks, group_size, has_offsets(kind)),
                    static_cast<W *>(packed));
            return LORAPLEX_OK;
        });
    });
}
