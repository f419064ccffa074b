// The innermost loop of `linear`: a few rows times a few panels, the sums held in registers.
//
// Every sum is one chain of multiply-adds over the inputs in their order, whatever the number of
// rows and panels. So all shapes of block, and all instruction sets with a fused multiply-add, give
// the same bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "loraplex/simd.h"
#include "packed_weight.h"

namespace loraplex {

// Inputs that one call takes: a panel's share of them stays in the first cache for all rows.
inline constexpr int kMaxDepth = 256;
// From row to row of the inputs; not a power of two, so that rows fall into different cache sets.
inline constexpr int kRowStride = kMaxDepth + 16;

// x: rows kRowStride apart. panels: the first panel's inputs; the next ones are panel_stride
// elements on. sums: [rows][panels * kPanelWidth] float32, added to unless this is the first call.
// ahead: weights of a later call, as many as one panel has; they are brought into the cache.
template <typename W>
using BlockFunction = void (*)(const float *x, const W *panels, std::int64_t panel_stride,
                               int depth, const W *ahead, float *sums, bool first);

// How many rows and panels a block has. The registers for sums bound the product.
struct BlockShape {
    int rows;
    int panels;  // a power of two
};

// kFewRows[r - 1] is the shape for r rows in all, kManyRows the one for more. The last block of
// rows may be lower. To read several panels at once hides the latency of the memory.
#if defined(LORAPLEX_ISA_X86_64_V4)
inline constexpr int kMaxVectors = 24;
inline constexpr std::array<BlockShape, 5> kFewRows = {{{1, 8}, {2, 4}, {3, 4}, {4, 4}, {5, 4}}};
inline constexpr BlockShape kManyRows = {12, 2};
#elif defined(LORAPLEX_ISA_X86_64_V3)
inline constexpr int kMaxVectors = 12;
inline constexpr std::array<BlockShape, 3> kFewRows = {{{1, 4}, {2, 2}, {3, 2}}};
inline constexpr BlockShape kManyRows = {6, 1};
#elif defined(LORAPLEX_ISA_NEON)
inline constexpr int kMaxVectors = 24;
inline constexpr std::array<BlockShape, 3> kFewRows = {{{1, 4}, {2, 2}, {3, 2}}};
inline constexpr BlockShape kManyRows = {6, 1};
#else
inline constexpr int kMaxVectors = 12;
inline constexpr std::array<BlockShape, 1> kFewRows = {{{1, 2}}};
inline constexpr BlockShape kManyRows = {3, 1};
#endif

constexpr BlockShape block_shape(std::int64_t num_rows) {
    const auto index = static_cast<std::size_t>(num_rows - 1);
    return index < kFewRows.size() ? kFewRows[index] : kManyRows;
}

template <typename T>
inline void prefetch(const T *address) {
    __builtin_prefetch(address);
}

template <typename W, int kRows, int kPanels>
struct Block {
    static constexpr int kVectorsPerPanel = static_cast<int>(kPanelWidth) / kLanes;
    static constexpr int kVectors = kPanels * kVectorsPerPanel;
    using Sums = Floats[kRows][kVectors];

    // sums += x[row] * weights(vector)
    template <typename Weights>
    __attribute__((always_inline)) static void step(Sums &sums, const float *x,
                                                    const Weights &weights) {
        if constexpr (kRows <= kVectors) {
            Floats inputs[kRows];
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                inputs[row] = broadcast(x[row * kRowStride]);
            }
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                const Floats weight = weights(vector);
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
                    sums[row][vector] = multiply_add(inputs[row], weight, sums[row][vector]);
                }
            }
        } else {
            Floats loaded[kVectors];
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                loaded[vector] = weights(vector);
            }
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                const Floats input = broadcast(x[row * kRowStride]);
#pragma GCC unroll 16
                for (int vector = 0; vector < kVectors; ++vector) {
                    sums[row][vector] = multiply_add(input, loaded[vector], sums[row][vector]);
                }
            }
        }
    }

    // Where the weights of one vector of outputs lie, for input 0.
    static std::int64_t place(int vector, std::int64_t panel_stride) {
        return vector / kVectorsPerPanel * panel_stride +
               vector % kVectorsPerPanel * kLanes * kInterleaved<W>;
    }

    __attribute__((always_inline)) static void multiply(Sums &sums, const float *x, const W *panels,
                                                        std::int64_t panel_stride, int depth,
                                                        const W *ahead) {
        for (int input = 0; input < depth; ++input) {
            prefetch(ahead + input * kPanelWidth);
            step(sums, x + input, [&](int vector) __attribute__((always_inline)) {
                return load(panels + place(vector, panel_stride));
            });
            panels += kPanelWidth;
        }
    }

    __attribute__((always_inline)) static void multiply_pairs(Sums &sums, const float *x,
                                                              const W *panels,
                                                              std::int64_t panel_stride, int depth,
                                                              const W *ahead) {
        int input = 0;
        for (; input + 2 <= depth; input += 2) {
            prefetch(ahead + input * kPanelWidth);
            step(sums, x + input, [&](int vector) __attribute__((always_inline)) {
                return load_firsts(panels + place(vector, panel_stride));
            });
            step(sums, x + input + 1, [&](int vector) __attribute__((always_inline)) {
                return load_seconds(panels + place(vector, panel_stride));
            });
            panels += 2 * kPanelWidth;
        }
        if (input < depth) {
            step(sums, x + input, [&](int vector) __attribute__((always_inline)) {
                return load_firsts(panels + place(vector, panel_stride));
            });
        }
    }

    static void run(const float *x, const W *panels, std::int64_t panel_stride, int depth,
                    const W *ahead, float *sums_in_memory, bool first) {
        Sums sums;
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                const float *source = sums_in_memory + (row * kVectors + vector) * kLanes;
                sums[row][vector] = first ? zeros() : load(source);
            }
        }
        if constexpr (kInterleaved<W> == 2) {
            multiply_pairs(sums, x, panels, panel_stride, depth, ahead);
        } else {
            multiply(sums, x, panels, panel_stride, depth, ahead);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                store(sums_in_memory + (row * kVectors + vector) * kLanes, sums[row][vector]);
            }
        }
    }
};

// The block of `rows` rows, of the height 1 .. rows or lower.
template <typename W, int kPanels, int kRows = 1>
constexpr BlockFunction<W> block_of_panels(int rows) {
    if (rows == kRows) {
        return &Block<W, kRows, kPanels>::run;
    }
    if constexpr ((kRows + 1) * kPanels * kPanelWidth <= kMaxVectors * kLanes &&
                  kRows < kManyRows.rows) {
        return block_of_panels<W, kPanels, kRows + 1>(rows);
    }
    return nullptr;
}

template <typename W>
BlockFunction<W> block_function(int rows, int panels) {
    constexpr int kMaxPanels = kFewRows[0].panels;
    if constexpr (kMaxPanels >= 8) {
        if (panels == 8) {
            return block_of_panels<W, 8>(rows);
        }
    }
    if constexpr (kMaxPanels >= 4) {
        if (panels == 4) {
            return block_of_panels<W, 4>(rows);
        }
    }
    return panels == 2 ? block_of_panels<W, 2>(rows) : block_of_panels<W, 1>(rows);
}

}  // namespace loraplex
