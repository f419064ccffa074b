#include "packed_weight.h"

#include <algorithm>
#include <cstring>

#include "large_pages.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"

namespace loraplex {
namespace {

// What must divide the inputs of a block: nibbles have whole groups.
std::int64_t unit_of(loraplex_weight_kind kind, std::int64_t group_size) {
    std::int64_t unit = 1;
    for_weight_kind(kind, [&]<typename W>(W) {
        unit = kHasSuperBlocks<W> ? kSuperInputs : kHasNibbles<W> ? group_size : 1;
        return LORAPLEX_OK;
    });
    return unit;
}

// Sizes whose product cannot overflow, and groups that a kernel takes.
bool are_valid(loraplex_weight_kind kind, std::int64_t group_size, std::int64_t num_blocks,
               std::int64_t out_features, std::int64_t in_features) {
    constexpr std::int64_t kLargest = std::int64_t{1} << 28;
    return out_features > 0 && in_features > 0 && out_features <= kLargest &&
           in_features <= kLargest && are_blocks(num_blocks, in_features) &&
           is_group_size(kind, group_size) &&
           in_features / num_blocks % unit_of(kind, group_size) == 0;
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

// Four bytes for each output: byte k has inputs k, 4 + k and so on, kBits of each.
template <int kBits>
void put_fours(const std::uint8_t *values, std::int64_t output, std::uint8_t *target) {
    constexpr int kFields = 8 / kBits;
    for (int k = 0; k < 4; ++k) {
        int byte = 0;
        for (int field = 0; field < kFields; ++field) {
            byte |= values[4 * field + k] << kBits * field;
        }
        target[output * 4 + k] = static_cast<std::uint8_t>(byte);
    }
}

// The values of one output in one super-block.
template <typename W>
void put_values(const std::int8_t *source, std::int64_t output, std::uint8_t *target) {
    constexpr auto kDepth = static_cast<int>(kInterleaved<W>);
    constexpr std::int64_t kLine = 4 * kPanelWidth;
    for (int first = 0; first < kSuperInputs; first += kDepth) {
        std::uint8_t low[kDepth], high[kDepth];
        for (int i = 0; i < kDepth; ++i) {
            const int value = source[first + i] + (std::is_same_v<W, Super6> ? 32 : 0);
            low[i] = static_cast<std::uint8_t>(value & 0xf);
            high[i] = static_cast<std::uint8_t>(value >> 4);
        }
        put_fours<4>(low, output, target);
        if constexpr (std::is_same_v<W, Super6>) {
            put_fours<4>(low + 8, output, target + kLine);
            put_fours<2>(high, output, target + 2 * kLine);
        }
        target += kDepth * kInputSize<W>;
    }
}

// What belongs to the rows of a weight; data is null where a kind has none.
struct Groups {
    Rows<float> scales;
    Rows<float> offsets;
    Rows<std::int8_t> factors;
    Rows<std::int8_t> minima;
};

// One output's super-blocks of one block, from super-block `first` of the row on.
template <typename W>
void put_super_blocks(const std::int8_t *values, const Groups &groups, std::int64_t row,
                      std::int64_t output, std::int64_t first, const PanelLayout<W> &layout,
                      W *target) {
    const SuperBlockLayout<W> parts = layout.super_block();
    auto *bytes = reinterpret_cast<std::uint8_t *>(target);
    for (std::int64_t i = 0; i < layout.block_inputs() / kSuperInputs; ++i) {
        put_values<W>(values + i * kSuperInputs, output, bytes);
        const std::int64_t super_block = first + i;
        const auto put_scale = [&](const Rows<float> &scales, std::int64_t place) {
            std::memcpy(bytes + place + output * static_cast<int>(sizeof(float)),
                        scales.row(row) + super_block, sizeof(float));
        };
        put_scale(groups.scales, parts.kScales);
        const std::int8_t *factors = groups.factors.row(row) + super_block * parts.num_groups;
        for (std::int64_t group = 0; group < parts.num_groups; ++group) {
            bytes[parts.factors() + group * kPanelWidth + output] =
                static_cast<std::uint8_t>(factors[group]);
        }
        if (parts.has_minima) {
            put_scale(groups.offsets, parts.minimum_scales());
            const std::int8_t *minima = groups.minima.row(row) + super_block * parts.num_groups;
            for (std::int64_t group = 0; group < parts.num_groups; ++group) {
                bytes[parts.minima() + group / 2 * 2 * kPanelWidth + output * 2 + group % 2] =
                    static_cast<std::uint8_t>(minima[group]);
            }
        }
        bytes += parts.num_bytes();
    }
}

// One output of one block, and its groups.
template <typename W>
void put_output(Rows<Source<W>> weight, const Groups &groups, std::int64_t row, std::int64_t block,
                std::int64_t output, const PanelLayout<W> &layout, W *target) {
    const Source<W> *values = weight.row(row) + block * layout.block_inputs();
    if constexpr (kHasSuperBlocks<W>) {
        put_super_blocks(values, groups, row, output, block * layout.block_inputs() / kSuperInputs,
                         layout, target);
    } else {
        put_inputs(values, output, layout, target);
        const std::int64_t first_group = block * layout.num_groups();
        W *scales = target + layout.values_size();
        put_groups(groups.scales.row(row) + first_group, layout.num_groups(), output, scales);
        if (layout.has_offsets()) {
            put_groups(groups.offsets.row(row) + first_group, layout.num_groups(), output,
                       scales + layout.scales_size());
        }
    }
}

template <typename W>
void pack(loraplex_pool &pool, Rows<Source<W>> weight, const Groups &groups,
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
                put_output(weight, groups, first + output, block, output, layout, target);
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
                                     const int8_t *factors, const int8_t *minima,
                                     int64_t factors_stride, const int16_t *table,
                                     int64_t out_features, int64_t in_features, void *packed) {
    using namespace loraplex;
    const bool has_factors = kind >= LORAPLEX_WEIGHT_SUPER4;
    if (!are_valid(kind, group_size, num_blocks, out_features, in_features) ||
        has_offsets(kind) != (offsets != nullptr) || has_factors != (factors != nullptr) ||
        (has_factors && has_offsets(kind)) != (minima != nullptr) ||
        (kind == LORAPLEX_WEIGHT_TABLE4) != (table != nullptr) ||
        (table != nullptr && !are_entries(table, group_size))) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    return guarded([&] {
        ask_for_large_pages(packed, loraplex_packed_weight_bytes(kind, group_size, num_blocks,
                                                                 out_features, in_features));
        return for_weight_kind(kind, [&]<typename W>(W) {
            pack<W>(*pool, {static_cast<const Source<W> *>(weight), weight_stride},
                    {{scales, scales_stride},
                     {offsets, scales_stride},
                     {factors, factors_stride},
                     {minima, factors_stride}},
                    table, out_features,
                    PanelLayout<W>(in_features, num_blocks, group_size, has_offsets(kind)),
                    static_cast<W *>(packed));
            return LORAPLEX_OK;
        });
    });
}
