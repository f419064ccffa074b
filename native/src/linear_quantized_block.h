// The innermost loop of `linear` over quantised weights: pairs of 16-bit inputs times pairs of
// weights that were widened to 16 bits, added in 32 bits.
//
// Within a group the sums are integers and exact. A group's sum times the scale of its weights, less
// the sum of its inputs times their offset, or times the scale of its inputs, is added in float32, group
// after group, each operation rounded. So every shape of block and every instruction set gives the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "linear_block.h"
#include "loraplex/abi.h"

namespace loraplex {

#if defined(LORAPLEX_ISA_X86_64_V4)
inline constexpr std::uint64_t kVnniFeature = LORAPLEX_CPU_AVX512_VNNI;
#elif defined(LORAPLEX_ISA_X86_64_V3)
inline constexpr std::uint64_t kVnniFeature = LORAPLEX_CPU_AVX_VNNI;
#endif

// sum + a0 * b0 + a1 * b1 with what the instruction set surely has.
struct PlainDot {
    Ints operator()(Ints sum, Pairs a, Pairs b) const { return dot_add(sum, a, b); }
};

// What a row of inputs, at x, has for each group: their sum or their scale.
template <typename W>
inline float number_of_group(const std::int16_t *x, int group) {
    float number;
    std::memcpy(&number, x + kMaxDepth<W> + group * 2, sizeof(number));
    return number;
}

struct NoTable {
    explicit NoTable(const std::uint8_t *) {}
};

template <typename W, typename Dot>
struct QuantizedBlock {
    using Table = std::conditional_t<std::is_same_v<W, Table4>, TableEntries, NoTable>;

    template <int kRows, int kPanels>
    struct Of {
        static constexpr int kVectors = kPanels * kVectorsPerPanel;
        using Sums = Ints[kRows][kVectors];

        // sums += the pair of inputs at x[row] times weight(vector)
        template <typename Weight>
        __attribute__((always_inline)) static void step(Sums &sums, const std::int16_t *x,
                                                        const Weight &weight) {
            outer_product(
                sums, [x](int row) { return broadcast_pair(x + row * kRowStride<W>); }, weight,
                [](Pairs a, Pairs b, Ints c) { return Dot{}(c, a, b); });
        }

        // Where the weights of one vector of outputs lie, for the first inputs.
        static std::int64_t place(int vector, std::int64_t stride) {
            constexpr int kVectorSize =
                static_cast<int>(kInterleaved<W> * kInputSize<W>) / kVectorsPerPanel;
            return vector / kVectorsPerPanel * stride + vector % kVectorsPerPanel * kVectorSize;
        }

        template <int kNibble>
        __attribute__((always_inline)) static void nibble_step(Sums &sums, const std::int16_t *x,
                                                               const Int4 *values,
                                                               std::int64_t stride) {
            step(sums, x + 2 * kNibble, [&](int vector) __attribute__((always_inline)) {
                return load_nibbles<kNibble>(&values[place(vector, stride)].two_values);
            });
            // The weights of the next step are not loaded earlier: there are no registers for them.
            asm volatile("" ::: "memory");
        }

        __attribute__((always_inline)) static void multiply(Sums &sums, const std::int16_t *x,
                                                            const Int8 *values, ReadAhead ahead,
                                                            std::int64_t stride, int depth,
                                                            const Table &) {
            for (int input = 0; input < depth; input += 2) {
                prefetch<kPanels, Int8>(ahead, input / 2, stride);
                step(sums, x + input, [&](int vector) __attribute__((always_inline)) {
                    return load_pairs(&values[place(vector, stride)].value);
                });
                values += 2 * kInputSize<Int8>;
            }
        }

        __attribute__((always_inline)) static void multiply(Sums &sums, const std::int16_t *x,
                                                            const Int4 *values, ReadAhead ahead,
                                                            std::int64_t stride, int depth,
                                                            const Table &) {
            for (int input = 0; input < depth; input += 8) {
                prefetch<kPanels, Int4>(ahead, input / 8, stride);
                nibble_step<0>(sums, x + input, values, stride);
                nibble_step<1>(sums, x + input, values, stride);
                nibble_step<2>(sums, x + input, values, stride);
                nibble_step<3>(sums, x + input, values, stride);
                values += 8 * kInputSize<Int4>;
            }
        }

        template <int kPair>
        __attribute__((always_inline)) static void table_step(Sums &sums, const std::int16_t *x,
                                                              const Table4 *values,
                                                              std::int64_t stride,
                                                              const TableEntries &table) {
            step(sums, x + 2 * kPair, [&](int vector) __attribute__((always_inline)) {
                const Table4 *fours = values + vector / kVectorsPerPanel * stride;
                return load_entries<kPair>(&fours->two_values, vector % kVectorsPerPanel, table);
            });
        }

        __attribute__((always_inline)) static void multiply(Sums &sums, const std::int16_t *x,
                                                            const Table4 *values, ReadAhead ahead,
                                                            std::int64_t stride, int depth,
                                                            const TableEntries &table) {
            for (int input = 0; input < depth; input += 4) {
                prefetch<kPanels, Table4>(ahead, input / 4, stride);
                table_step<0>(sums, x + input, values, stride, table);
                table_step<1>(sums, x + input, values, stride, table);
                values += 4 * kInputSize<Table4>;
            }
        }

        static void run(const std::int16_t *x, const BlockWeights<W> &weights, int depth,
                        float *sums_in_memory, bool first) {
            const auto group_size = static_cast<int>(weights.group_size);
            const Table table(weights.table);
            int group = 0;
            for (int input = 0; input < depth; input += group_size) {
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
                         std::min(group_size, depth - input), table);
                if (weights.of_groups == OfGroups::kNothing) {
                    add_group<OfGroups::kNothing>(sums, x, weights, group, sums_in_memory,
                                                  first && group == 0);
                } else if (weights.of_groups == OfGroups::kSums) {
                    add_group<OfGroups::kSums>(sums, x, weights, group, sums_in_memory,
                                               first && group == 0);
                } else {
                    add_group<OfGroups::kScales>(sums, x, weights, group, sums_in_memory,
                                                 first && group == 0);
                }
                ++group;
            }
        }

        template <OfGroups kOfGroups>
        __attribute__((always_inline)) static void add_group(const Sums &sums,
                                                             const std::int16_t *x,
                                                             const BlockWeights<W> &weights,
                                                             int group, float *sums_in_memory,
                                                             bool first) {
            constexpr auto kScaleSize = static_cast<std::int64_t>(sizeof(float) / sizeof(W));
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                const std::int64_t place = vector / kVectorsPerPanel * weights.stride / kScaleSize +
                                           vector % kVectorsPerPanel * kLanes +
                                           group * kPanelWidth;
                const Floats scale = load(weights.scales + place);
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
                    float *target = sums_in_memory + (row * kVectors + vector) * kLanes;
                    Floats share = loraplex::multiply(to_floats(sums[row][vector]), scale);
                    if constexpr (kOfGroups != OfGroups::kNothing) {
                        const float number = number_of_group<W>(x + row * kRowStride<W>, group);
                        if constexpr (kOfGroups == OfGroups::kScales) {
                            share = loraplex::multiply(broadcast(number), share);
                        } else {
                            share = subtract(share,
                                             loraplex::multiply(broadcast(number),
                                                                load(weights.offsets + place)));
                        }
                    }
                    store(target, add(first ? zeros() : load(target), share));
                }
            }
        }
    };
};

template <typename W>
    requires(kIsQuantized<W>)
BlockFunction<W> block_function(BlockShape shape, [[maybe_unused]] std::uint64_t cpu_features) {
#if defined(LORAPLEX_ISA_X86_64_V4) || defined(LORAPLEX_ISA_X86_64_V3)
    if ((cpu_features & kVnniFeature) != 0) {
        return block_of<BlockFunction<W>, QuantizedBlock<W, VnniDot>::template Of>(
            shape);
    }
#endif
    return block_of<BlockFunction<W>, QuantizedBlock<W, PlainDot>::template Of>(shape);
}

}  // namespace loraplex
