// Where the elements of a packed weight lie.
//
// The outputs (rows of the weight) are cut into panels of kPanelWidth. In a panel the inputs follow
// one another, and for each input the panel's outputs: a kernel reads it front to back. A kernel
// takes up to kPanelMultiple panels at once, so there are zeros up to that multiple. Small elements
// are interleaved, several inputs for each output, as a kernel widens them:
//
//   bfloat16  pairs w[o][i], w[o][i + 1]: a shift and a mask widen them
//   Int8      pairs, as a multiplication of pairs of int16 takes them
//   Int4      eights: two 16-bit words for each output, the even and the odd inputs, each with the
//             first input in the lowest four bits: a shift or two widen one pair
//   Table4    fours, 32 bytes: byte 16 l + k is of output 8 (k / 8) + 4 l + k % 8 / 2, inputs k % 2
//             (its low four bits) and 2 + k % 2. So the halves of an entry that are looked up with
//             16 bytes at a time are interleaved to pairs of neighbouring outputs
//   Super4    eights: four bytes for each output, byte k has input k in its low four bits and input
//             4 + k in the high ones
//   Super6    sixteens, of value + 32: the low four bits as two eights of Super4, then four bytes for
//             each output, byte k has the high two bits of inputs k, 4 + k, 8 + k and 12 + k
//
// What is missing at the end is 0. After the values of a quantised panel come its scales:
// [groups of inputs][kPanelWidth] float32; then its offsets, if there are any, likewise; then the
// table of Table4: the low bytes of the 16 entries, then their high bytes.
//
// The inputs of a panel may be cut into equal blocks, which lie one after another, each like a panel
// of its own.
//
// Super4 and Super6 have super-blocks of kSuperInputs inputs, each whole before the next one: its
// values; kPanelWidth float32 scales; as many scales of minima, if there are any; the factors
// [groups][kPanelWidth] int8; and the minima [pairs of groups][kPanelWidth][2] int8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "loraplex/dtype.h"
#include "loraplex/linear.h"

namespace loraplex {

// Elements of quantised weights, -128 .. 127, -8 .. 7, 0 .. 15, 0 .. 15 and -32 .. 31. In memory Int4,
// Table4 and Super4 are two of them.
struct Int8 {
    std::int8_t value;
};

struct Int4 {
    std::uint8_t two_values;
};

struct Table4 {
    std::uint8_t two_values;
};

struct Super4 {
    std::uint8_t bits;
};

struct Super6 {
    std::uint8_t bits;
};

template <typename W>
inline constexpr bool kHasNibbles = std::is_same_v<W, Int4> || std::is_same_v<W, Table4>;

// Whether scales have two levels: a group's whole factor times the float of a super-block.
template <typename W>
inline constexpr bool kHasSuperBlocks = std::is_same_v<W, Super4> || std::is_same_v<W, Super6>;

template <typename W>
inline constexpr bool kIsQuantized =
    std::is_same_v<W, Int8> || kHasNibbles<W> || kHasSuperBlocks<W>;

inline constexpr std::int64_t kPanelWidth = 16;
inline constexpr std::int64_t kPanelMultiple = 8;

template <typename W>
inline constexpr std::int64_t kInterleaved = 1;
template <>
inline constexpr std::int64_t kInterleaved<Bfloat16> = 2;
template <>
inline constexpr std::int64_t kInterleaved<Int8> = 2;
template <>
inline constexpr std::int64_t kInterleaved<Int4> = 8;
template <>
inline constexpr std::int64_t kInterleaved<Table4> = 4;
template <>
inline constexpr std::int64_t kInterleaved<Super4> = 8;
template <>
inline constexpr std::int64_t kInterleaved<Super6> = 16;

inline constexpr std::int64_t kSuperInputs = LORAPLEX_SUPER_BLOCK_INPUTS;

inline constexpr std::int64_t kTableEntries = 16;
template <typename W>
inline constexpr std::int64_t kTableSize = std::is_same_v<W, Table4> ? 2 * kTableEntries : 0;

// Elements in memory of one input of a panel.
template <typename W>
inline constexpr std::int64_t kInputSize = std::is_same_v<W, Super6> ? kPanelWidth * 3 / 4
                                           : kHasNibbles<W> || std::is_same_v<W, Super4>
                                               ? kPanelWidth / 2
                                               : kPanelWidth;

// Where the parts of a super-block lie, in bytes from its first. group_size: inputs that share a factor.
template <typename W>
struct SuperBlockLayout {
    static constexpr std::int64_t kScales = kSuperInputs * kInputSize<W>;
    static constexpr std::int64_t kScalesBytes = kPanelWidth * sizeof(float);

    std::int64_t num_groups;
    bool has_minima;

    SuperBlockLayout(std::int64_t group_size, bool has_minima)
        : num_groups(kSuperInputs / group_size), has_minima(has_minima) {}

    std::int64_t minimum_scales() const { return kScales + kScalesBytes; }
    std::int64_t factors() const { return kScales + (has_minima ? 2 : 1) * kScalesBytes; }
    std::int64_t minima() const { return factors() + num_groups * kPanelWidth; }
    std::int64_t num_bytes() const {
        return factors() + (has_minima ? 2 : 1) * num_groups * kPanelWidth;
    }
};

// With those that hold nothing.
constexpr std::int64_t num_panels(std::int64_t out_features) {
    constexpr std::int64_t kOutputs = kPanelWidth * kPanelMultiple;
    return (out_features + kOutputs - 1) / kOutputs * kPanelMultiple;
}

// The sizes of one panel. group_size is the number of inputs that share a scale, 0 if there is none.
// num_blocks divides in_features.
template <typename W>
class PanelLayout {
public:
    PanelLayout(std::int64_t in_features, std::int64_t num_blocks, std::int64_t group_size,
                bool has_offsets)
        : num_blocks_(num_blocks), block_inputs_(in_features / num_blocks),
          padded_inputs_((block_inputs_ + kInterleaved<W> - 1) / kInterleaved<W> *
                         kInterleaved<W>),
          group_size_(group_size),
          num_groups_(kIsQuantized<W> ? (block_inputs_ + group_size - 1) / group_size : 0),
          scales_size_(num_groups_ * kPanelWidth * kScaleSize), has_offsets_(has_offsets) {}

    std::int64_t num_blocks() const { return num_blocks_; }
    std::int64_t block_inputs() const { return block_inputs_; }
    std::int64_t group_size() const { return group_size_; }
    bool has_offsets() const { return has_offsets_; }

    // Of one block; each has a scale, or of super-blocks a factor.
    std::int64_t num_groups() const { return num_groups_; }

    SuperBlockLayout<W> super_block() const
        requires kHasSuperBlocks<W>
    {
        return {group_size_, has_offsets_};
    }

    // From one panel to the next, in elements: W's of 1 byte, where there are scales.
    std::int64_t stride() const { return num_blocks_ * block_stride(); }

    // From one block of a panel to the next.
    std::int64_t block_stride() const {
        if constexpr (kHasSuperBlocks<W>) {
            return block_inputs_ / kSuperInputs * super_block().num_bytes();
        }
        return values_size() + (has_offsets_ ? 2 : 1) * scales_size_ + kTableSize<W>;
    }

    // Of one block.
    std::int64_t values_size() const { return padded_inputs_ * kInputSize<W>; }

    // From a group's scales to its offsets.
    std::int64_t scales_size() const { return scales_size_; }

    // first_input counts in the block, here and below.
    const W *values(const W *panel, std::int64_t block, std::int64_t first_input) const {
        if constexpr (kHasSuperBlocks<W>) {
            return panel + block * block_stride() +
                   first_input / kSuperInputs * super_block().num_bytes();
        }
        return panel + block * block_stride() + first_input * kInputSize<W>;
    }

    // Of the group that starts at first_input; null where no scales lie after the values.
    const float *scales(const W *panel, std::int64_t block, std::int64_t first_input) const {
        if constexpr (kIsQuantized<W> && !kHasSuperBlocks<W>) {
            const auto *scales = reinterpret_cast<const float *>(values(panel, block, 0) +
                                                                 values_size());
            return scales + first_input / group_size_ * kPanelWidth;
        } else {
            return nullptr;
        }
    }

    // Of the group that starts at first_input; null where there are no offsets.
    const float *offsets(const W *panel, std::int64_t block, std::int64_t first_input) const {
        return has_offsets_ && !kHasSuperBlocks<W>
                   ? scales(panel, block, first_input) + scales_size_ / kScaleSize
                   : nullptr;
    }

    // Nothing lies there but in Table4.
    const std::uint8_t *table(const W *panel, std::int64_t block) const {
        return reinterpret_cast<const std::uint8_t *>(panel + (block + 1) * block_stride() -
                                                      kTableSize<W>);
    }

private:
    static constexpr auto kScaleSize = static_cast<std::int64_t>(sizeof(float) / sizeof(W));

    std::int64_t num_blocks_;
    std::int64_t block_inputs_;
    std::int64_t padded_inputs_;
    std::int64_t group_size_;
    std::int64_t num_groups_;
    std::int64_t scales_size_;  // of one block, in elements
    bool has_offsets_;
};

// Blocks of inputs: what the kernels can add up.
constexpr bool are_blocks(std::int64_t num_blocks, std::int64_t in_features) {
    return num_blocks >= 1 && num_blocks <= LORAPLEX_MAX_BLOCKS &&
           (num_blocks & (num_blocks - 1)) == 0 && in_features % num_blocks == 0;
}

// Inputs that share a scale: what the kernels of a kind can do.
constexpr bool is_group_size(loraplex_weight_kind kind, std::int64_t group_size) {
    if (kind < LORAPLEX_WEIGHT_INT8) {
        return group_size == 0;
    }
    if (kind >= LORAPLEX_WEIGHT_SUPER4) {
        return group_size == 16 || group_size == 32;
    }
    return group_size >= LORAPLEX_MIN_GROUP_SIZE && group_size <= LORAPLEX_MAX_GROUP_SIZE &&
           (group_size & (group_size - 1)) == 0;
}

constexpr bool has_offsets(loraplex_weight_kind kind) {
    return kind == LORAPLEX_WEIGHT_INT8_OFFSETS || kind == LORAPLEX_WEIGHT_INT4_OFFSETS ||
           kind == LORAPLEX_WEIGHT_SUPER4 || kind == LORAPLEX_WEIGHT_SUPER6_OFFSETS;
}

// Whether the inputs are rounded to 8 bits, group by group.
constexpr bool has_byte_inputs(loraplex_weight_kind kind) {
    return kind == LORAPLEX_WEIGHT_INT8_BY_INT8 || kind == LORAPLEX_WEIGHT_INT4_BY_INT8;
}

// body(W{}) with the element type of a kind; what it returns.
template <typename Body>
loraplex_status for_weight_kind(loraplex_weight_kind kind, const Body &body) {
    switch (kind) {
        case LORAPLEX_WEIGHT_FLOAT32:
            return body(float{});
        case LORAPLEX_WEIGHT_BFLOAT16:
            return body(Bfloat16{});
        case LORAPLEX_WEIGHT_FLOAT16:
            return body(Float16{});
        case LORAPLEX_WEIGHT_INT8:
        case LORAPLEX_WEIGHT_INT8_OFFSETS:
        case LORAPLEX_WEIGHT_INT8_BY_INT8:
            return body(Int8{});
        case LORAPLEX_WEIGHT_INT4:
        case LORAPLEX_WEIGHT_INT4_OFFSETS:
        case LORAPLEX_WEIGHT_INT4_BY_INT8:
            return body(Int4{});
        case LORAPLEX_WEIGHT_TABLE4:
            return body(Table4{});
        case LORAPLEX_WEIGHT_SUPER4:
            return body(Super4{});
        case LORAPLEX_WEIGHT_SUPER6:
        case LORAPLEX_WEIGHT_SUPER6_OFFSETS:
            return body(Super6{});
        default:
            return LORAPLEX_INVALID_ARGUMENT;
    }
}

}  // namespace loraplex
