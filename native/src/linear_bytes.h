// Products of inputs of 8 bits and quantised weights by AVX512-VNNI: four of each output at once.
//
// The instruction takes unsigned weights, so a number is added to all, and its share is taken from a
// group's sum. All are integers and exact: the bits are those of products of pairs.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "linear_group_inputs.h"
#include "linear_vectors.h"

namespace loraplex {

// How many times a vector of a panel has four inputs of each output.
template <typename W>
inline constexpr int kFours = kHasNibbles<W> ? 2 : 1;

// The fours of a vector, as unsigned bytes: value + GroupInputs::kZero.
template <typename W>
class ByteUnpacking {
public:
    template <int kFour>
    __attribute__((always_inline)) __m512i fours(__m512i vector) const {
        const __m512i bytes = _mm512_xor_si512(vector, signs_);
        if constexpr (!kHasNibbles<W>) {
            return _mm512_permutexvar_epi16(choice_, bytes);
        } else {
            return _mm512_and_si512(kFour == 0 ? bytes : _mm512_srli_epi16(bytes, 4), choice_);
        }
    }

private:
    struct Constants {
        alignas(64) std::uint8_t signs[64];
        alignas(64) std::uint16_t choice[32];
    };

    static constexpr Constants make_constants() {
        Constants result{};
        std::fill(std::begin(result.signs), std::end(result.signs),
                  std::uint8_t{kHasNibbles<W> ? 0x88 : 0x80});
        for (std::uint16_t i = 0; i < 32; ++i) {
            // Bytes have a pair of inputs of each output, then the next pair.
            result.choice[i] = kHasNibbles<W> ? 0x0f0f : i / 2 + i % 2 * 16;
        }
        return result;
    }

    // Volatile: a compiler would keep the constants of one group for the next, and move sums to
    // memory instead.
    static __m512i read(const void *constant) {
        return *static_cast<const volatile __m512i *>(constant);
    }

    static constexpr Constants kConstants = make_constants();

    __m512i signs_ = read(kConstants.signs);
    __m512i choice_ = read(kConstants.choice);
};

template <typename W>
struct ByteBlock {
    using RowInputs = GroupInputs<W, std::int8_t>;
    // Inputs of a vector of a panel.
    static constexpr int kStepInputs = 4 * kFours<W>;

    template <int kRows, int kPanels>
    struct Of {
        using Sums = Ints[kRows][kPanels];
        using FourBytes __attribute__((may_alias)) = std::int32_t;

        static void run(const std::int8_t *x, const BlockWeights<W> &weights, int depth,
                        float *sums_in_memory, bool first) {
            const auto group_size = static_cast<int>(weights.group_size);
            for (int input = 0, group = 0; input < depth; input += group_size, ++group) {
                Sums sums;
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                    for (int panel = 0; panel < kPanels; ++panel) {
                        sums[row][panel] = zero_ints();
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
                values += kByteMultiple;
            }
        }

        template <int kFour>
        __attribute__((always_inline)) static void step(Sums &sums, const std::int8_t *x,
                                                        const W *values, std::int64_t stride,
                                                        const ByteUnpacking<W> &unpacking) {
            outer_product(
                sums,
                [x](int row) {
                    return reinterpret_cast<const FourBytes *>(x + row * RowInputs::kStride) +
                           kFour;
                },
                [&](int panel) __attribute__((always_inline)) {
                    return unpacking.template fours<kFour>(
                        _mm512_loadu_si512(values + panel * stride));
                },
                add_products);
        }

        // In assembly: the library must load without it. Inputs from memory: a compiler would load
        // those of all rows first, and has no registers for them.
        __attribute__((always_inline)) static Ints add_products(const FourBytes *inputs,
                                                                __m512i weights, Ints sum) {
            asm("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*inputs), "v"(weights));
            return sum;
        }

        __attribute__((always_inline)) static void add_group(const Sums &sums,
                                                             const std::int8_t *x,
                                                             const BlockWeights<W> &weights,
                                                             int group, float *sums_in_memory,
                                                             bool first) {
            constexpr auto kScaleSize = static_cast<std::int64_t>(sizeof(float) / sizeof(W));
#pragma GCC unroll 16
            for (int panel = 0; panel < kPanels; ++panel) {
                const Floats scale = load(weights.scales + panel * weights.stride / kScaleSize +
                                          group * kPanelWidth);
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
                    float *target = sums_in_memory + (row * kPanels + panel) * kLanes;
                    const std::int8_t *of_row = x + row * RowInputs::kStride;
                    const Ints sum = _mm512_add_epi32(
                        sums[row][panel], _mm512_set1_epi32(RowInputs::missing(of_row, group)));
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
