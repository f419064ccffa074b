// What the innermost loops of `linear` share: the shapes of a block and the product of a step.
//
// A block is a few rows times a few panels, its sums held in registers. linear_float_block.h has the
// loop over float weights, linear_quantized_block.h the one over quantised ones.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "loraplex/simd.h"
#include "outer_product.h"
#include "packed_weight.h"

namespace loraplex {

// What a row of inputs is brought to.
template <typename W>
using Input = std::conditional_t<kIsQuantized<W>, std::int16_t, float>;

// Inputs that one call takes: the share of its panels, that of the next call and the rows' inputs
// are in the first cache at the same time.
template <typename W>
inline constexpr int kMaxDepth = kIsQuantized<W>              ? LORAPLEX_MAX_GROUP_SIZE
                                 : std::is_same_v<W, float> ? 128
                                                              : 256;

// So far ahead one block of rows reads weights, in bytes of each panel.
inline constexpr int kReadAheadBytes = 4096;

// Few rows read so many panels at once, or more, and wait for the memory alone. They read ahead into
// the second cache: the first one has fewer requests under way than the memory could serve.
inline constexpr int kManyPanels = 4;

// After a row's inputs come, for quantised weights with offsets, the float32 sums of their groups.
template <typename W>
inline constexpr int kGroupSums =
    kIsQuantized<W> ? kMaxDepth<W> / LORAPLEX_MIN_GROUP_SIZE *
                          static_cast<int>(sizeof(float) / sizeof(Input<W>))
                    : 0;

// From row to row of the inputs; not a power of two, so that rows fall into different cache sets.
template <typename W>
inline constexpr int kRowStride =
    kMaxDepth<W> + kGroupSums<W> + 64 / static_cast<int>(sizeof(Input<W>));

// What a call brings into the cache, evenly over its steps: the memory has a speed, too. A step is
// the inputs that are interleaved.
struct ReadAhead {
    const std::byte *weights = nullptr;  // in the first panel; the others are a panel's stride apart
    std::int64_t weights_pace = 0;       // bytes of each panel in a step
    const std::byte *inputs = nullptr;  // those of the next rows: a line in a step

    template <typename W>
    static constexpr std::int64_t kStepBytes =
        kInterleaved<W> * kInputSize<W> * static_cast<std::int64_t>(sizeof(W));

    // As many weights as the call reads.
    template <typename W>
    static ReadAhead whole(const W *weights) {
        return {reinterpret_cast<const std::byte *>(weights), kStepBytes<W>};
    }

    // Part i of them, for one of num_calls calls that read the same ones.
    template <typename W>
    static ReadAhead part(const W *weights, int depth, std::int64_t num_calls, std::int64_t i) {
        const std::int64_t pace = (kStepBytes<W> + num_calls - 1) / num_calls;
        const std::int64_t num_steps = depth / kInterleaved<W>;
        return {reinterpret_cast<const std::byte *>(weights) + i * num_steps * pace, pace};
    }

    ReadAhead from_step(std::int64_t step) const {
        return is_none() ? *this
                         : ReadAhead{weights + step * weights_pace, weights_pace,
                                     inputs + step * 64};
    }

    // Whether the CPU reads ahead by itself: one row's weights, in order, are all that is read.
    bool is_none() const { return weights == nullptr; }
};

// What a row of inputs has for each group: nothing, the sum of its inputs, which the weight's offsets are
// multiplied by, or their scale.
enum class OfGroups { kNothing, kSums, kScales };

// The weights of one call: the first panel's from the call's first input on.
template <typename W>
struct BlockWeights {
    const W *values;
    std::int64_t stride;  // to the same input of the next panel
    const float *scales;  // of the first group in the call; from panel to panel as the values
    const float *offsets;       // likewise; null if there are none
    const std::uint8_t *table;  // of Table4
    OfGroups of_groups;
    std::int64_t group_size;
    ReadAhead ahead;
};

// x: rows kRowStride apart, or what their type has. sums: [rows][panels * kPanelWidth] float32, added to unless this is the
// first call.
template <typename W, typename X = Input<W>>
using BlockFunction = void (*)(const X *x, const BlockWeights<W> &weights, int depth, float *sums,
                               bool first);

// How many rows and panels a block has. The registers for sums bound the product.
struct BlockShape {
    int rows;
    int panels;  // a power of two
};

// few[r - 1] is the shape for r rows in all, many the one for more. The last block of rows may be
// lower. To read several panels at once hides the latency of the memory.
template <std::size_t kFew>
struct BlockShapes {
    std::array<BlockShape, kFew> few;
    BlockShape many;

    constexpr BlockShape of(std::int64_t num_rows) const {
        const auto index = static_cast<std::size_t>(num_rows - 1);
        return index < few.size() ? few[index] : many;
    }
};

// kShapesWithTotals: of blocks with two sums of each row and vector.
#if defined(LORAPLEX_ISA_X86_64_V4)
inline constexpr BlockShapes<5> kShapes = {{{{1, 8}, {2, 4}, {3, 4}, {4, 4}, {5, 4}}}, {12, 2}};
inline constexpr BlockShapes<3> kShapesWithTotals = {{{{1, 8}, {2, 4}, {3, 4}}}, {6, 2}};
#elif defined(LORAPLEX_ISA_X86_64_V3)
inline constexpr BlockShapes<2> kShapes = {{{{1, 4}, {2, 2}}}, {6, 1}};
inline constexpr BlockShapes<1> kShapesWithTotals = {{{{1, 2}}}, {3, 1}};
#elif defined(LORAPLEX_ISA_NEON)
inline constexpr BlockShapes<3> kShapes = {{{{1, 4}, {2, 2}, {3, 2}}}, {6, 1}};
inline constexpr BlockShapes<1> kShapesWithTotals = {{{{1, 2}}}, {3, 1}};
#else
inline constexpr BlockShapes<1> kShapes = {{{{1, 2}}}, {3, 1}};
inline constexpr BlockShapes<1> kShapesWithTotals = kShapes;
#endif

// The lowest and the highest block that so many panels are used with.
struct BlockRows {
    int lowest;
    int highest;
};

template <const auto &kOf>
constexpr BlockRows block_rows(int panels) {
    constexpr int kMany = static_cast<int>(kOf.few.size()) + 1;
    if (kOf.many.panels == panels) {
        // Rows are cut into blocks of nearly equal height.
        return {std::min(kMany, (kOf.many.rows + 1) / 2), kOf.many.rows};
    }
    BlockRows rows = {kMany, 0};
    for (const BlockShape shape : kOf.few) {
        if (shape.panels == panels) {
            rows = {std::min(rows.lowest, shape.rows), std::max(rows.highest, shape.rows)};
        }
    }
    return rows;
}

inline constexpr int kVectorsPerPanel = static_cast<int>(kPanelWidth) / kLanes;

// Brings into the cache what is due in a step, at most a line of each panel.
template <int kPanels, typename W>
__attribute__((always_inline)) inline void prefetch(const ReadAhead &ahead, std::int64_t step,
                                                    std::int64_t stride) {
    if (ahead.is_none()) {
        return;
    }
    constexpr int kLocality = kPanels >= kManyPanels ? 2 : 3;
    const std::byte *weights = ahead.weights + step * ahead.weights_pace;
#pragma GCC unroll 16
    for (int panel = 0; panel < kPanels; ++panel) {
        __builtin_prefetch(weights + panel * stride * static_cast<std::int64_t>(sizeof(W)), 0,
                           kLocality);
    }
    __builtin_prefetch(ahead.inputs + step * 64);
}

// The Block<rows, kPanels>::run of the rows that are used with so many panels.
template <typename Function, template <int, int> typename Block, int kPanels,
          const auto &kOf = kShapes, int kRows = block_rows<kOf>(kPanels).lowest>
constexpr Function block_of_panels(int rows) {
    if constexpr (kRows <= block_rows<kOf>(kPanels).highest) {
        return rows == kRows ? &Block<kRows, kPanels>::run
                             : block_of_panels<Function, Block, kPanels, kOf, kRows + 1>(rows);
    } else {
        return nullptr;
    }
}

template <typename Function, template <int, int> typename Block, const auto &kOf = kShapes>
Function block_of(BlockShape shape) {
    switch (shape.panels) {
        case 8:
            return block_of_panels<Function, Block, 8, kOf>(shape.rows);
        case 4:
            return block_of_panels<Function, Block, 4, kOf>(shape.rows);
        case 2:
            return block_of_panels<Function, Block, 2, kOf>(shape.rows);
        default:
            return block_of_panels<Function, Block, 1, kOf>(shape.rows);
    }
}

}  // namespace loraplex
