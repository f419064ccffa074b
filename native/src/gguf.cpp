#include "loraplex/gguf.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gguf_blocks.h"
#include "large_pages.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "packed_weight.h"

namespace loraplex {
namespace {

constexpr std::int64_t kLine = 4 * kPanelWidth;

std::uint64_t eight(const std::uint8_t *bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
}

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
    const std::uint64_t ones = 0x0101010101010101u, all = ones * static_cast<unsigned>(added);
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
    return std::is_same_v<W, Super6> || std::is_same_v<Type, Q4K>;
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

template <typename W>
loraplex_status pack(loraplex_pool &pool, bool has_minima, std::int64_t group_size,
                     const void *const *rows, const std::uint8_t *types, std::int64_t out_features,
                     std::int64_t in_features, std::uint8_t *packed, std::int32_t *all_finite) {
    const bool fits = std::all_of(types, types + out_features, [&](std::uint8_t type) {
        return takes<W>(type, group_size, has_minima);
    });
    if (!fits) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    // Blocks of inputs are whole super-blocks, one after another, so they change nothing.
    const SuperBlockLayout<W> parts(group_size, has_minima);
    const std::int64_t num_blocks = in_features / kSuperInputs;
    std::atomic<bool> is_finite{true};
    const Op op(pool);
    pool.parallel_for_tiles(num_panels(out_features), [&](std::int64_t index, int) {
        const std::int64_t first = index * kPanelWidth;
        const std::int64_t num_outputs =
            std::clamp<std::int64_t>(out_features - first, 0, kPanelWidth);
        std::uint8_t *target = packed + index * num_blocks * parts.num_bytes();
        if (num_outputs < kPanelWidth) {
            std::memset(target, 0, static_cast<std::size_t>(num_blocks * parts.num_bytes()));
        }
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            if (!put_blocks<W>(rows + first, types + first, num_outputs, block, group_size, parts,
                               target + block * parts.num_bytes())) {
                is_finite = false;
            }
        }
    });
    *all_finite = is_finite;
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
        return for_weight_kind(kind, [&]<typename W>(W) -> loraplex_status {
            if constexpr (kHasSuperBlocks<W>) {
                return pack<W>(*pool, has_offsets(kind), group_size, rows, types, out_features,
                               in_features, static_cast<std::uint8_t *>(packed), all_finite);
            } else {
                return LORAPLEX_INVALID_ARGUMENT;
            }
        });
    });
}
