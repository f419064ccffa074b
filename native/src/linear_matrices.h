// Products of bfloat16 inputs and weights by aarch64's instruction for matrices of them: two rows times
// two outputs, four inputs of each.
//
// A row without a second one is both, and one of its results is dropped. Every sum is one chain over
// the inputs, pair after pair, in all shapes of block.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <cstdint>

#include "linear_inputs.h"
#include "linear_vectors.h"

namespace loraplex {

using MatrixInputs = PairInputs<kMaxDepth<Bfloat16>>;

template <int kRows, int kPanels>
struct MatrixBlock {
    static constexpr int kInputs = 4;
    static constexpr int kTilesPerPanel = static_cast<int>(kPanelWidth) / 2;
    static constexpr int kRowPairs = (kRows + 1) / 2;
    static constexpr int kTiles = kPanels * kTilesPerPanel;
    // Of two rows, two outputs each.
    using Sums = Floats[kRowPairs][kTiles];

    static void run(const Bfloat16 *x, const BlockWeights<Bfloat16> &weights, int depth,
                    float *sums_in_memory, bool first) {
        Sums sums;
#pragma GCC unroll 32
        for (int i = 0; i < kRowPairs * kTiles; ++i) {
            const float *source = sums_in_memory + i % kTiles * 2;
            sums[i / kTiles][i % kTiles] =
                first ? zeros()
                      : vcombine_f32(vld1_f32(source + first_row(i / kTiles) * kRowSize),
                                     vld1_f32(source + second_row(i / kTiles) * kRowSize));
        }
        const Bfloat16 *values = weights.values;
        int input = 0;
        for (; input + 2 < depth; input += kInputs) {
            prefetch<kPanels, Bfloat16>(weights.ahead, input / 2, weights.stride);
            prefetch<kPanels, Bfloat16>(weights.ahead, input / 2 + 1, weights.stride);
            step(sums, x + input, values, weights.stride, load_pairs);
            values += kInputs * kPanelWidth;
        }
        if (input < depth) {
            // What comes after a panel's values is no number, and 0 times that need not be 0.
            step(sums, x + input, values, weights.stride,
                 [](const Bfloat16 *) { return vdupq_n_u32(0); });
        }
#pragma GCC unroll 32
        for (int i = 0; i < kRowPairs * kTiles; ++i) {
            float *target = sums_in_memory + i % kTiles * 2;
            const Floats sum = sums[i / kTiles][i % kTiles];
            vst1_f32(target + second_row(i / kTiles) * kRowSize, vget_high_f32(sum));
            vst1_f32(target + first_row(i / kTiles) * kRowSize, vget_low_f32(sum));
        }
    }

private:
    static constexpr int kRowSize = kPanels * static_cast<int>(kPanelWidth);

    static constexpr int first_row(int pair) { return 2 * pair; }
    static constexpr int second_row(int pair) { return std::min(2 * pair + 1, kRows - 1); }

    // Four outputs' pairs of inputs.
    static uint32x4_t load_pairs(const Bfloat16 *pairs) {
        return vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const std::uint16_t *>(pairs)));
    }

    // seconds: what a tile has in place of its second pairs, by their place.
    template <typename Seconds>
    __attribute__((always_inline)) static void step(Sums &sums, const Bfloat16 *x,
                                                    const Bfloat16 *values, std::int64_t stride,
                                                    const Seconds &seconds) {
        const auto row = [x](int index) __attribute__((always_inline)) {
            return vld1_u16(
                reinterpret_cast<const std::uint16_t *>(x + index * MatrixInputs::kStride));
        };
        outer_product(
            sums,
            [&](int pair) __attribute__((always_inline)) {
                return vcombine_u16(row(first_row(pair)), row(second_row(pair)));
            },
            [&](int tile) __attribute__((always_inline)) {
                const Bfloat16 *four =
                    values + tile / kTilesPerPanel * stride + tile % kTilesPerPanel / 2 * 8;
                const uint32x4_t a = load_pairs(four), b = seconds(four + 2 * kPanelWidth);
                return tile % 2 == 0 ? vzip1q_u32(a, b) : vzip2q_u32(a, b);
            },
            add_products);
    }

    // In assembly: the library must load without it.
    __attribute__((always_inline)) static Floats add_products(uint16x8_t inputs,
                                                              uint32x4_t weights, Floats sum) {
        asm(".arch armv8.2-a+bf16\n\tbfmmla %0.4s, %1.8h, %2.8h"
            : "+w"(sum)
            : "w"(inputs), "w"(weights));
        return sum;
    }
};

class MatrixProducts : public VectorProducts<Bfloat16, MatrixInputs> {
public:
    static Cut cut(std::int64_t num_rows) {
        return num_rows <= 2 ? Cut{{static_cast<int>(num_rows), 2}, 1, kMaxTileRows}
                             : VectorProducts::cut(std::max<std::int64_t>(num_rows, kShapes.many.rows));
    }

    MatrixProducts(const PanelLayout<Bfloat16> &layout, std::uint64_t cpu_features)
        : VectorProducts(layout, cpu_features, &function) {}

private:
    static Function function(BlockShape shape, std::uint64_t /*cpu_features*/) {
        if (shape.panels == 2) {
            return shape.rows == 1 ? &MatrixBlock<1, 2>::run : &MatrixBlock<2, 2>::run;
        }
        return block_of_panels<Function, MatrixBlock, kShapes.many.panels>(shape.rows);
    }
};

}  // namespace loraplex
