// Products of inputs of 8 bits and quantised weights by instructions for fours of bytes: those of four
// inputs of each output at once.
//
// Where the instruction takes unsigned weights, a number is added to all, and its share is taken from
// a group's sum. All are integers and exact: the bits are those of products of pairs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_group_inputs.h"
#include "linear_vectors.h"

#if defined(LORAPLEX_ISA_NEON)
#include "byte_fours_neon.h"
#else
#include "byte_fours_avx512.h"
#endif

namespace loraplex {

// How many times 64 bytes of a panel have four inputs of each output.
template <typename W>
inline constexpr int kFours = kHasNibbles<W> ? 2 : 1;

template <typename W>
struct ByteBlock {
    using RowInputs = GroupInputs<W, std::int8_t>;
    static constexpr int kStepInputs = 4 * kFours<W>;
    static constexpr int kStepBytes = 4 * kPanelWidth;

    template <int kRows, int kPanels>
    struct Of {
        static constexpr int kVectors = kPanels * kVectorsPerPanel;
        using Sums = Ints[kRows][kVectors];

        static void run(const std::int8_t *x, const BlockWeights<W> &weights, int depth,
                        float *sums_in_memory, bool first) {
            const auto group_size = static_cast<int>(weights.group_size);
            for (int input = 0, group = 0; input < depth; input += group_size, ++group) {
                Sums sums;
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                    for (int vector = 0; vector < kVectors; ++vector) {
                        sums[row][vector] = zero_ints();
                    }
                }
                multiply(sums, x + input, weights.values + input * kInputSize<W>,
                         weights.ahead.from_step(input / kInterleaved<W>), weights.stride,
                         std::min(group_size, depth - input));
                add_group(sums, x, weights, group, sums_in_memory, first && group == 0);
            }
        }

    private:
        __attribute__((always_inline)) static void multiply(Sums &sums, const std::int8_t *x,
                                                            const W *values, ReadAhead ahead,
                                                            std::int64_t stride, int depth) {
            constexpr int kAheadSteps = kStepInputs / static_cast<int>(kInterleaved<W>);
            const ByteUnpacking<W> unpacking;
            for (int input = 0; input < depth; input += kStepInputs) {
#pragma GCC unroll 2
                for (int step = 0; step < kAheadSteps; ++step) {
                    prefetch<kPanels, W>(ahead, input / kInterleaved<W> + step, stride);
                }
                step<0>(sums, x + input, values, stride, unpacking);
                if constexpr (kFours<W> == 2) {
                    step<1>(sums, x + input, values, stride, unpacking);
                }
                values += kStepBytes;
            }
        }

        template <int kFour>
        __attribute__((always_inline)) static void step(Sums &sums, const std::int8_t *x,
                                                        const W *values, std::int64_t stride,
                                                        const ByteUnpacking<W> &unpacking) {
            outer_product(
                sums,
                [x](int row) {
                    return broadcast_fours(x + row * RowInputs::kStride + 4 * kFour);
                },
                [&](int vector) __attribute__((always_inline)) {
                    return unpacking.template fours<kFour>(
                        values + vector / kVectorsPerPanel * stride, vector % kVectorsPerPanel);
                },
                add_fours);
        }

        __attribute__((always_inline)) static void add_group(const Sums &sums,
                                                             const std::int8_t *x,
                                                             const BlockWeights<W> &weights,
                                                             int group, float *sums_in_memory,
                                                             bool first) {
            constexpr auto kScaleSize = static_cast<std::int64_t>(sizeof(float) / sizeof(W));
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                const Floats scale =
                    load(weights.scales + vector / kVectorsPerPanel * weights.stride / kScaleSize +
                         group * kPanelWidth + vector % kVectorsPerPanel * kLanes);
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
                    float *target = sums_in_memory + (row * kVectors + vector) * kLanes;
                    const std::int8_t *of_row = x + row * RowInputs::kStride;
                    const Ints sum =
                        add_to_all(sums[row][vector], RowInputs::missing(of_row, group));
                    const Floats share =
                        loraplex::multiply(loraplex::multiply(to_floats(sum), scale),
                                           broadcast(RowInputs::scale(of_row, group)));
                    store(target, add(first ? zeros() : load(target), share));
                }
            }
        }
    };
};

template <typename W>
class ByteProducts : public VectorProducts<W, GroupInputs<W, std::int8_t>> {
public:
    ByteProducts(const PanelLayout<W> &layout, std::uint64_t cpu_features)
        : VectorProducts<W, GroupInputs<W, std::int8_t>>(layout, cpu_features, &function) {}

private:
    using Function = BlockFunction<W, std::int8_t>;

    static Function function(BlockShape shape, std::uint64_t /*cpu_features*/) {
        return block_of<Function, ByteBlock<W>::template Of>(shape);
    }
};

}  // namespace loraplex
