#include "loraplex/gguf.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gguf_blocks.h"
#include "gguf_groups.h"
#include "large_pages.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "packed_weight.h"

namespace loraplex {
namespace {

constexpr std::int64_t kLine = 4 * kPanelWidth;

// A weight's rows where they lie, and the type of each.
struct Rows {
    const void *const *data;
    const std::uint8_t *types;
    std::int64_t count;
};

void put_word(std::uint64_t word, std::uint8_t *target) {
    const auto low = static_cast<std::uint32_t>(word);
    std::memcpy(target, &low, sizeof(low));
}

// Byte k of the low half becomes byte k with byte 4 + k above its kBits.
template <int kBits>
std::uint64_t folded(std::uint64_t word) {
    return (word | word >> (32 - kBits)) & 0xffffffffu;
}

// Codes of 4 bits.
void put_values(Super4 * /*kind*/, const std::uint8_t *codes, int /*added*/,
                std::uint8_t *target) {
    for (int first = 0; first < kBlockValues; first += 8) {
        put_word(folded<4>(eight(codes + first)), target);
        target += kLine;
    }
}

// `added` makes codes of 6 bits; no byte overflows into the next one.
void put_values(Super6 * /*kind*/, const std::uint8_t *codes, int added, std::uint8_t *target) {
    const std::uint64_t ones = kOnes, all = ones * static_cast<unsigned>(added);
    for (int first = 0; first < kBlockValues; first += 16) {
        const std::uint64_t a = eight(codes + first) + all, b = eight(codes + first + 8) + all;
        put_word(folded<4>(a & ones * 15), target);
        put_word(folded<4>(b & ones * 15), target + kLine);
        const std::uint64_t high = folded<2>(a >> 4 & ones * 3) | folded<2>(b >> 4 & ones * 3) << 4;
        put_word(high, target + 2 * kLine);
        target += 3 * kLine;
    }
}

// One output's part of a super-block. `per_group`: groups of the panel in one of the file.
template <typename W>
void put_super_block(const SuperBlock &block, int added, std::int64_t per_group,
                     std::int64_t output, const SuperBlockLayout<W> &parts, std::uint8_t *target) {
    put_values(static_cast<W *>(nullptr), block.codes, added, target + output * 4);
    std::memcpy(target + parts.kScales + output * 4, &block.scale, sizeof(float));
    for (std::int64_t group = 0; group < parts.num_groups; ++group) {
        target[parts.factors() + group * kPanelWidth + output] =
            static_cast<std::uint8_t>(block.factors[group / per_group]);
    }
    if (!parts.has_minima) {
        return;
    }
    std::memcpy(target + parts.minimum_scales() + output * 4, &block.minimum_scale, sizeof(float));
    for (std::int64_t group = 0; group < parts.num_groups; ++group) {
        target[parts.minima() + group / 2 * 2 * kPanelWidth + output * 2 + group % 2] =
            static_cast<std::uint8_t>(block.minima[group / per_group]);
    }
}

template <typename W, typename Type>
constexpr bool has_values_of() {
    return std::is_same_v<W, Super6> || Type::kIsNarrow;
}

template <typename W>
bool takes(loraplex_gguf_type type, std::int64_t group_size, bool has_minima) {
    return for_gguf_type(type, [&]<typename Type>(Type) -> loraplex_status {
               const bool fits = has_values_of<W, Type>() && Type::kGroupSize >= group_size &&
                                 (has_minima || !Type::kHasMinima);
               return fits ? LORAPLEX_OK : LORAPLEX_INVALID_ARGUMENT;
           }) == LORAPLEX_OK;
}

// A panel's super-block: one block of each of its rows. False if a scale is not finite.
template <typename W>
bool put_blocks(const void *const *rows, const std::uint8_t *types, std::int64_t num_outputs,
                std::int64_t index, std::int64_t group_size, const SuperBlockLayout<W> &parts,
                std::uint8_t *target) {
    bool is_finite = true;
    for (std::int64_t output = 0; output < num_outputs; ++output) {
        for_gguf_type(types[output], [&]<typename Type>(Type) -> loraplex_status {
            if constexpr (has_values_of<W, Type>()) {
                SuperBlock block;
                Type::decode(static_cast<const std::uint8_t *>(rows[output]) +
                                 index * Type::kBytes,
                             block);
                is_finite = is_finite && block.is_finite();
                // Super6 has values from -32 on.
                const int added = std::is_same_v<W, Super6> ? 32 - Type::kZero : 0;
                put_super_block<W>(block, added, Type::kGroupSize / group_size, output, parts,
                                   target);
            }
            return LORAPLEX_OK;
        });
    }
    return is_finite;
}

// body(index, number of outputs) for each panel, which is zeros already where rows lack.
template <typename Body>
void for_each_panel(loraplex_pool &pool, std::int64_t out_features, std::int64_t panel_bytes,
                    std::uint8_t *packed, const Body &body) {
    const Op op(pool);
    pool.parallel_for_tiles(num_panels(out_features), [&](std::int64_t index, int) {
        const std::int64_t num_outputs =
            std::clamp<std::int64_t>(out_features - index * kPanelWidth, 0, kPanelWidth);
        if (num_outputs < kPanelWidth) {
            std::memset(packed + index * panel_bytes, 0, static_cast<std::size_t>(panel_bytes));
        }
        body(index, num_outputs);
    });
}

template <typename W>
    requires kHasSuperBlocks<W>
loraplex_status pack(loraplex_pool &pool, const PanelLayout<W> &layout, const Rows &rows,
                     std::uint8_t *packed, std::atomic<bool> &is_finite) {
    const SuperBlockLayout<W> parts = layout.super_block();
    const bool fits = std::all_of(rows.types, rows.types + rows.count, [&](std::uint8_t type) {
        return takes<W>(type, layout.group_size(), parts.has_minima);
    });
    if (!fits) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    // Blocks of inputs are whole super-blocks, one after another, so they change nothing.
    const std::int64_t num_blocks = layout.stride() / parts.num_bytes();
    for_each_panel(pool, rows.count, layout.stride(), packed,
                   [&](std::int64_t index, std::int64_t num_outputs) {
                       const std::int64_t first = index * kPanelWidth;
                       std::uint8_t *target = packed + index * layout.stride();
                       for (std::int64_t block = 0; block < num_blocks; ++block) {
                           if (!put_blocks<W>(rows.data + first, rows.types + first, num_outputs,
                                              block, layout.group_size(), parts,
                                              target + block * parts.num_bytes())) {
                               is_finite = false;
                           }
                       }
                   });
    return LORAPLEX_OK;
}

// Eight codes as a panel's own values. It is exact: bytes hold the entries of all tables.
template <typename W, typename Type>
std::uint64_t values_of(std::uint64_t codes) {
    if constexpr (std::is_same_v<W, Table4>) {
        return codes;
    } else if constexpr (Type::kTable != nullptr) {
        std::uint64_t values = 0;
        for (int i = 0; i < 64; i += 8) {
            const auto entry = static_cast<std::uint8_t>(Type::kTable[codes >> i & 15]);
            values |= static_cast<std::uint64_t>(entry) << i;
        }
        return values;
    } else if constexpr (Type::kZero != 0) {
        // The top bit of each byte, which no code has, keeps it from borrowing of the next.
        return ((codes | 0x80 * kOnes) - kOnes * Type::kZero) ^ 0x80 * kOnes;
    } else {
        return codes;
    }
}

// Eight values of one output, as packed_weight.h says.
void put_eight(Int8 * /*kind*/, std::uint64_t values, std::int64_t output, std::uint8_t *target) {
    for (int pair = 0; pair < 4; ++pair) {
        const auto two = static_cast<std::uint16_t>(values >> 16 * pair);
        std::memcpy(target + (pair * kPanelWidth + output) * 2, &two, sizeof(two));
    }
}

void put_eight(Int4 * /*kind*/, std::uint64_t values, std::int64_t output, std::uint8_t *target) {
    // Of each 16 bits the lowest four are of an even input, and those from the ninth on of the next one.
    const auto fours = [](std::uint64_t even) {
        even &= 0x000f000f000f000fu;
        return (even | even >> 12 | even >> 24 | even >> 36) & 0xffffu;
    };
    put_word(fours(values) | fours(values >> 8) << 16, target + output * 4);
}

void put_eight(Table4 * /*kind*/, std::uint64_t values, std::int64_t output, std::uint8_t *target) {
    const std::int64_t place = output % 8 / 4 * 16 + output / 8 * 8 + output % 4 * 2;
    for (int four = 0; four < 2; ++four) {
        const std::uint64_t word = values >> 32 * four & 0xffffffffu;
        const auto two = static_cast<std::uint16_t>(word | word >> 12);
        std::memcpy(target + four * 4 * kInputSize<Table4> + place, &two, sizeof(two));
    }
}

template <typename W, typename Type>
constexpr bool takes_group_type() {
    return std::is_same_v<W, Int8> ||
           (!Type::kIsWide && (Type::kTable != nullptr) == std::is_same_v<W, Table4>);
}

// The table of a type; null for one without, and for one that the kind does not take.
template <typename W>
bool takes_groups(const Rows &rows, bool has_offsets, const std::int8_t *&table) {
    table = nullptr;
    return std::all_of(rows.types, rows.types + rows.count, [&](std::uint8_t type) {
        return for_group_type(type, [&]<typename Type>(Type) -> loraplex_status {
                   const bool is_first = table == nullptr;
                   table = is_first ? Type::kTable : table;
                   const bool fits = takes_group_type<W, Type>() &&
                                     (has_offsets || !Type::kHasOffset) &&
                                     (!std::is_same_v<W, Table4> || table == Type::kTable);
                   return fits ? LORAPLEX_OK : LORAPLEX_INVALID_ARGUMENT;
               }) == LORAPLEX_OK;
    });
}

// A group of each of a panel's rows. False if a scale is not finite.
template <typename W>
bool put_groups(const void *const *rows, const std::uint8_t *types, std::int64_t num_outputs,
                std::int64_t index, std::uint8_t *values, float *scales, float *offsets) {
    bool is_finite = true;
    for (std::int64_t output = 0; output < num_outputs; ++output) {
        for_group_type(types[output], [&]<typename Type>(Type) -> loraplex_status {
            if constexpr (takes_group_type<W, Type>()) {
                GroupOfValues group;
                Type::decode(static_cast<const std::uint8_t *>(rows[output]) +
                                 index / Type::kGroups * Type::kBytes,
                             static_cast<int>(index % Type::kGroups), group);
                for (int i = 0; i < kGroupValues / 8; ++i) {
                    put_eight(static_cast<W *>(nullptr), values_of<W, Type>(group.codes[i]), output,
                              values + i * 8 * kInputSize<W>);
                }
                scales[output] = group.scale;
                if (offsets != nullptr) {
                    offsets[output] = group.offset;
                }
                is_finite = is_finite && std::isfinite(group.scale);
            }
            return LORAPLEX_OK;
        });
    }
    return is_finite;
}

template <typename W>
    requires(kIsQuantized<W> && !kHasSuperBlocks<W>)
loraplex_status pack(loraplex_pool &pool, const PanelLayout<W> &layout, const Rows &rows,
                     std::uint8_t *packed, std::atomic<bool> &is_finite) {
    const std::int8_t *table = nullptr;
    if (layout.group_size() != kGroupValues || layout.block_inputs() % kGroupValues != 0 ||
        !takes_groups<W>(rows, layout.has_offsets(), table)) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    const auto put_panel = [&](std::int64_t index, std::int64_t num_outputs) {
        const std::int64_t first = index * kPanelWidth;
        auto *panel = reinterpret_cast<W *>(packed + index * layout.stride());
        for (std::int64_t group = 0; group < layout.num_blocks() * layout.num_groups(); ++group) {
            const std::int64_t block = group / layout.num_groups();
            const std::int64_t input = group % layout.num_groups() * kGroupValues;
            const auto *values = layout.values(panel, block, input);
            if (!put_groups<W>(rows.data + first, rows.types + first, num_outputs, group,
                               reinterpret_cast<std::uint8_t *>(const_cast<W *>(values)),
                               const_cast<float *>(layout.scales(panel, block, input)),
                               const_cast<float *>(layout.offsets(panel, block, input)))) {
                is_finite = false;
            }
        }
        if constexpr (kTableSize<W> > 0) {
            for (std::int64_t block = 0; block < layout.num_blocks(); ++block) {
                auto *target = const_cast<std::uint8_t *>(layout.table(panel, block));
                for (std::int64_t i = 0; i < kTableEntries; ++i) {
                    target[i] = static_cast<std::uint8_t>(table[i]);
                    target[kTableEntries + i] = table[i] < 0 ? 0xff : 0;
                }
            }
        }
    };
    for_each_panel(pool, rows.count, layout.stride(), packed, put_panel);
    return LORAPLEX_OK;
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_pack_gguf(loraplex_pool *pool, loraplex_weight_kind kind,
                                   int64_t group_size, int64_t num_blocks, const void *const *rows,
                                   const uint8_t *types, int64_t out_features, int64_t in_features,
                                   void *packed, int32_t *all_finite) {
    using namespace loraplex;
    const std::int64_t num_bytes =
        loraplex_packed_weight_bytes(kind, group_size, num_blocks, out_features, in_features);
    if (num_bytes == 0) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    return guarded([&] {
        ask_for_large_pages(packed, num_bytes);
        std::atomic<bool> is_finite{true};
        const auto status = for_weight_kind(kind, [&]<typename W>(W) -> loraplex_status {
            if constexpr (kIsQuantized<W>) {
                const PanelLayout<W> layout(in_features, num_blocks, group_size, has_offsets(kind));
                return pack<W>(*pool, layout, {rows, types, out_features},
                               static_cast<std::uint8_t *>(packed), is_finite);
            } else {
                return LORAPLEX_INVALID_ARGUMENT;
            }
        });
        *all_finite = is_finite;
        return status;
    });
}
