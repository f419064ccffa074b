// The innermost loop of `linear` over float32, bfloat16 and float16 weights.
//
// Every sum is one chain of multiply-adds over the inputs in their order, whatever the number of
// rows and panels. So all shapes of block, and all instruction sets with a fused multiply-add, give
// the same bits.
#pragma once

#include <cstdint>

#include "linear_block.h"

namespace loraplex {

template <typename W>
struct FloatBlock {
    template <int kRows, int kPanels>
    struct Of {
        static constexpr int kVectors = kPanels * kVectorsPerPanel;
        using Sums = Floats[kRows][kVectors];

        // sums += x[row] * weight(vector)
        template <typename Weight>
        __attribute__((always_inline)) static void step(Sums &sums, const float *x,
                                                        const Weight &weight) {
            outer_product(
                sums, [x](int row) { return broadcast(x[row * kRowStride<W>]); }, weight,
                [](Floats a, Floats b, Floats c) { return multiply_add(a, b, c); });
        }

        // Where the weights of one vector of outputs lie, for the first input.
        static std::int64_t place(int vector, std::int64_t stride) {
            return vector / kVectorsPerPanel * stride +
                   vector % kVectorsPerPanel * kLanes * kInterleaved<W>;
        }

        __attribute__((always_inline)) static void multiply(Sums &sums, const float *x,
                                                            BlockWeights<W> weights, int depth) {
            const W *values = weights.values;
            for (int input = 0; input < depth; ++input) {
                prefetch<kPanels, W>(weights.ahead, input, weights.stride);
                step(sums, x + input, [&](int vector) __attribute__((always_inline)) {
                    return load(values + place(vector, weights.stride));
                });
                values += kPanelWidth;
            }
        }

        __attribute__((always_inline)) static void multiply_pairs(Sums &sums, const float *x,
                                                                  BlockWeights<W> weights,
                                                                  int depth) {
            const W *values = weights.values;
            int input = 0;
            for (; input + 2 <= depth; input += 2) {
                prefetch<kPanels, W>(weights.ahead, input / 2, weights.stride);
                step(sums, x + input, [&](int vector) __attribute__((always_inline)) {
                    return load_firsts(values + place(vector, weights.stride));
                });
                step(sums, x + input + 1, [&](int vector) __attribute__((always_inline)) {
                    return load_seconds(values + place(vector, weights.stride));
                });
                values += 2 * kPanelWidth;
            }
            if (input < depth) {
                step(sums, x + input, [&](int vector) __attribute__((always_inline)) {
                    return load_firsts(values + place(vector, weights.stride));
                });
            }
        }

        static void run(const float *x, const BlockWeights<W> &weights, int depth,
                        float *sums_in_memory, bool first) {
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
                multiply_pairs(sums, x, weights, depth);
            } else {
                multiply(sums, x, weights, depth);
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
};

template <typename W>
    requires(!kIsQuantized<W>)
BlockFunction<W> block_function(BlockShape shape, std::uint64_t /*cpu_features*/) {
    return block_of<BlockFunction<W>, FloatBlock<W>::template Of>(shape);
}

}  // namespace loraplex
