// Products of weights in super-blocks, by fours of bytes: inputs have 8 bits and one scale for each
// super-block.
//
// A group's sum is whole, and so is the sum of all groups times their factors, which fits in 32 bits:
// 256 inputs of at most 127, weights of at most 63 and factors of at most 128. What the inputs' sums
// times the minima give is whole, too. So every shape of block and every instruction set gives the
// same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "linear_block.h"
#include "linear_inputs.h"
#include "linear_vectors.h"

namespace loraplex {

// [piece][row], each row: its inputs, in their order; for each super-block of the piece what the sums of
// its groups lack, since Super6 is multiplied as value + 32, and the sums of its groups' inputs; the
// scales.
template <typename W>
class SuperBlockInputs {
public:
    static constexpr int kDepth = kMaxDepth<W>;
    static constexpr bool kScalesBlocks = false;
    static constexpr int kZero = std::is_same_v<W, Super6> ? 32 : 0;

    static OfGroups of_groups(const PanelLayout<W> &layout) {
        return layout.has_offsets() ? OfGroups::kSums : OfGroups::kNothing;
    }

    // row: of a piece, here and below
    static std::int32_t missing(const std::int8_t *row, int super_block, int group) {
        return number<std::int32_t>(row + kMissing, super_block * kMaxGroups + group);
    }

    // The sums of the inputs of groups 2 pair and 2 pair + 1.
    static const std::int16_t *sums(const std::int8_t *row, int super_block, int pair) {
        return reinterpret_cast<const std::int16_t *>(row + kSums) + super_block * kMaxGroups +
               2 * pair;
    }

    static float scale(const std::int8_t *row, int super_block) {
        return number<float>(row + kScales, super_block);
    }

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return static_cast<std::size_t>(pieces.size() * num_rows * kStride);
    }

    // memory: num_bytes of it
    SuperBlockInputs(void *memory, std::int64_t num_rows, const InputPieces<W> &pieces)
        : rows_(static_cast<std::int8_t *>(memory)), num_rows_(num_rows), pieces_(pieces) {}

    const std::int8_t *at(const InputPiece &piece, std::int64_t row) const {
        return rows_ + (piece.index * num_rows_ + row) * kStride;
    }

    template <typename T>
    void set_row(std::int64_t row, const T *x) {
        for (InputPiece piece = pieces_.start(0); piece.block < pieces_.num_blocks();
             piece = pieces_.after(piece)) {
            const T *source = x + piece.block * pieces_.block_inputs() + piece.first;
            auto *target = const_cast<std::int8_t *>(at(piece, row));
            for (int i = 0; i * kSuperInputs < piece.depth; ++i) {
                set_super_block(source + i * kSuperInputs, i, target);
            }
        }
    }

private:
    static constexpr int kSuperBlocks = kDepth / static_cast<int>(kSuperInputs);
    static constexpr int kMaxGroups =
        static_cast<int>(kSuperInputs) / LORAPLEX_MIN_GROUP_SIZE;
    static constexpr int kMissing = kDepth;
    static constexpr int kSums =
        kMissing + kSuperBlocks * kMaxGroups * static_cast<int>(sizeof(std::int32_t));
    static constexpr int kScales =
        kSums + kSuperBlocks * kMaxGroups * static_cast<int>(sizeof(std::int16_t));

public:
    // Not a power of two, so that rows fall into different cache sets.
    static constexpr std::int64_t kStride = kScales + 64;

private:
    static constexpr float kLargest = std::numeric_limits<std::int8_t>::max();

    template <typename Number>
    static Number number(const std::int8_t *numbers, int index) {
        Number result;
        std::memcpy(&result, numbers + index * static_cast<int>(sizeof(result)), sizeof(result));
        return result;
    }

    template <typename Number>
    static void set_number(std::int8_t *numbers, int index, Number value) {
        std::memcpy(numbers + index * static_cast<int>(sizeof(value)), &value, sizeof(value));
    }

    template <typename T>
    void set_super_block(const T *source, int super_block, std::int8_t *row) const {
        const Rounding rounding(largest_magnitude(source, kSuperInputs), kLargest);
        std::int8_t *inputs = row + super_block * kSuperInputs;
        round_inputs(source, static_cast<int>(kSuperInputs), rounding.factor, inputs);
        set_number(row + kScales, super_block, rounding.scale);
        const auto group_size = static_cast<int>(pieces_.group_size());
        for (int group = 0; group * group_size < kSuperInputs; ++group) {
            std::int32_t sum = 0;
            for (int i = 0; i < group_size; ++i) {
                sum += inputs[group * group_size + i];
            }
            const int index = super_block * kMaxGroups + group;
            set_number(row + kMissing, index, -kZero * sum);
            set_number(row + kSums, index, static_cast<std::int16_t>(sum));
        }
    }

    std::int8_t *rows_;
    std::int64_t num_rows_;
    InputPieces<W> pieces_;
};

// Four inputs of the outputs of one vector of a panel, kFour-th of a step; at: the vector's first byte.
template <typename W, int kFour>
__attribute__((always_inline)) inline Fours load_fours(const std::uint8_t *at) {
    constexpr std::int64_t kLine = 4 * kPanelWidth;
    constexpr std::uint8_t kLow = 0x0f, kHigh = 0x30;
    const Fours low = load_bits<kFour % 2 * 4>(at + kFour / 2 * kLine, kLow);
    if constexpr (std::is_same_v<W, Super6>) {
        return unite(low, load_bits<2 * kFour - 4>(at + 2 * kLine, kHigh));
    } else {
        return low;
    }
}

// What multiplies fours of bytes at once.
#if defined(LORAPLEX_ISA_X86_64_V4)
inline constexpr std::uint64_t kFoursFeature = LORAPLEX_CPU_AVX512_VNNI;
#elif defined(LORAPLEX_ISA_X86_64_V3)
inline constexpr std::uint64_t kFoursFeature = LORAPLEX_CPU_AVX_VNNI;
#elif defined(LORAPLEX_ISA_NEON)
inline constexpr std::uint64_t kFoursFeature = LORAPLEX_CPU_NEON_DOTPROD;
#endif

template <typename W, typename Dot>
struct SuperBlockProduct {
    using RowInputs = SuperBlockInputs<W>;

    template <int kRows, int kPanels>
    struct Of {
        static constexpr int kVectors = kPanels * kVectorsPerPanel;
        using Sums = Ints[kRows][kVectors];

        static void run(const std::int8_t *x, const BlockWeights<W> &weights, int depth,
                        float *sums_in_memory, bool first) {
            const bool has_minima = weights.of_groups == OfGroups::kSums;
            const SuperBlockLayout<W> parts(weights.group_size, has_minima);
            const auto *panel = reinterpret_cast<const std::uint8_t *>(weights.values);
            for (int i = 0; i * kSuperInputs < depth; ++i) {
                Sums totals;
                set_all(totals, [](int) { return zero_ints(); });
                add_groups(totals, x, i, panel, parts, weights);
                const bool is_first = first && i == 0;
                if (has_minima) {
                    write<true>(totals, x, i, panel, parts, weights.stride, sums_in_memory,
                                is_first);
                } else {
                    write<false>(totals, x, i, panel, parts, weights.stride, sums_in_memory,
                                 is_first);
                }
                panel += parts.num_bytes();
            }
        }

    private:
        template <typename Value>
        __attribute__((always_inline)) static void set_all(Sums &sums, const Value &of_row) {
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                const Ints value = of_row(row);
#pragma GCC unroll 16
                for (int vector = 0; vector < kVectors; ++vector) {
                    sums[row][vector] = value;
                }
            }
        }

        // Where a vector of outputs has what each output has `size` bytes of, at a place of the panel.
        static const std::uint8_t *at(const std::uint8_t *place, int vector, std::int64_t stride,
                                      int size) {
            return place + vector / kVectorsPerPanel * stride +
                   vector % kVectorsPerPanel * kLanes * size;
        }

        // totals += the sums of a super-block's groups times their factors
        __attribute__((always_inline)) static void add_groups(Sums &totals, const std::int8_t *x,
                                                              int super_block,
                                                              const std::uint8_t *panel,
                                                              const SuperBlockLayout<W> &parts,
                                                              const BlockWeights<W> &weights) {
            constexpr auto kStep = static_cast<int>(kInterleaved<W>);
            const auto group_size = static_cast<int>(weights.group_size);
            const std::int8_t *inputs = x + super_block * kSuperInputs;
            const std::uint8_t *values = panel;
            ReadAhead ahead = weights.ahead.from_step(super_block * kSuperInputs / kStep);
            for (int group = 0; group < parts.num_groups; ++group) {
                Sums sums;
                set_all(sums, [&](int row) {
                    return RowInputs::kZero == 0
                               ? zero_ints()
                               : broadcast(RowInputs::missing(x + row * RowInputs::kStride,
                                                              super_block, group));
                });
                for (int input = 0; input < group_size; input += kStep) {
                    read_ahead(ahead, weights.stride);
                    ahead = ahead.from_step(1);
                    step<0>(sums, inputs, values, weights.stride);
                    step<1>(sums, inputs, values, weights.stride);
                    if constexpr (kStep == 16) {
                        step<2>(sums, inputs, values, weights.stride);
                        step<3>(sums, inputs, values, weights.stride);
                    }
                    inputs += kStep;
                    values += kStep * kInputSize<W>;
                }
#pragma GCC unroll 16
                for (int vector = 0; vector < kVectors; ++vector) {
                    const auto *factors = reinterpret_cast<const std::int8_t *>(
                        at(panel + parts.factors() + group * kPanelWidth, vector, weights.stride,
                           1));
                    const Ints factor = load_ints(factors);
#pragma GCC unroll 16
                    for (int row = 0; row < kRows; ++row) {
                        totals[row][vector] =
                            add(totals[row][vector], multiply(sums[row][vector], factor));
                    }
                }
            }
        }

        // What is due in a step, a line after another.
        __attribute__((always_inline)) static void read_ahead(ReadAhead ahead,
                                                              std::int64_t stride) {
            const std::int64_t pace = ahead.is_none() ? 0 : ahead.weights_pace;
            for (std::int64_t line = 0; line < pace; line += 64) {
                prefetch<kPanels, W>(ahead, 0, stride);
                ahead.weights += 64;
            }
        }

        template <int kFour>
        __attribute__((always_inline)) static void step(Sums &sums, const std::int8_t *x,
                                                        const std::uint8_t *values,
                                                        std::int64_t stride) {
            outer_product(
                sums,
                [x](int row) {
                    return broadcast_fours(x + row * RowInputs::kStride + 4 * kFour);
                },
                [&](int vector) __attribute__((always_inline)) {
                    return load_fours<W, kFour>(at(values, vector, stride, 4));
                },
                [](auto inputs, Fours fours, Ints sum)
                    __attribute__((always_inline)) { return Dot{}(sum, fours, inputs); });
        }

        template <bool kHasMinima>
        __attribute__((always_inline)) static void write(const Sums &totals, const std::int8_t *x,
                                                         int super_block,
                                                         const std::uint8_t *panel,
                                                         const SuperBlockLayout<W> &parts,
                                                         std::int64_t stride,
                                                         float *sums_in_memory, bool first) {
            const auto floats = [&](std::int64_t place, int vector) {
                return load(reinterpret_cast<const float *>(
                    at(panel + place, vector, stride, sizeof(float))));
            };
            const auto num_pairs = static_cast<int>(parts.num_groups / 2);
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                const Floats scale = floats(parts.kScales, vector);
                const Floats minimum_scale =
                    kHasMinima ? floats(parts.minimum_scales(), vector) : zeros();
                for (int row = 0; row < kRows; ++row) {
                    const std::int8_t *of_row = x + row * RowInputs::kStride;
                    Floats share = multiply(to_floats(totals[row][vector]), scale);
                    if constexpr (kHasMinima) {
                        Ints minima = zero_ints();
                        for (int pair = 0; pair < num_pairs; ++pair) {
                            const std::uint8_t *pairs =
                                at(panel + parts.minima() + pair * 2 * kPanelWidth, vector, stride,
                                   2);
                            minima = dot_add(
                                minima, broadcast_pair(RowInputs::sums(of_row, super_block, pair)),
                                load_pairs(reinterpret_cast<const std::int8_t *>(pairs)));
                        }
                        share = subtract(share, multiply(to_floats(minima), minimum_scale));
                    }
                    share = multiply(share, broadcast(RowInputs::scale(of_row, super_block)));
                    float *target = sums_in_memory + (row * kVectors + vector) * kLanes;
                    store(target, add(first ? zeros() : load(target), share));
                }
            }
        }
    };
};

template <typename W>
class SuperBlockProducts : public VectorProducts<W, SuperBlockInputs<W>, kShapesWithTotals> {
    using Base = VectorProducts<W, SuperBlockInputs<W>, kShapesWithTotals>;

public:
    SuperBlockProducts(const PanelLayout<W> &layout, std::uint64_t cpu_features)
        : Base(layout, cpu_features, &function) {}

private:
    using Function = typename Base::Function;

    static Function function(BlockShape shape, [[maybe_unused]] std::uint64_t cpu_features) {
#if !defined(LORAPLEX_ISA_GENERIC)
        if ((cpu_features & kFoursFeature) != 0) {
            return block_of<Function, SuperBlockProduct<W, VnniFours>::template Of,
                            kShapesWithTotals>(shape);
        }
#endif
        return block_of<Function, SuperBlockProduct<W, PlainFours>::template Of,
                        kShapesWithTotals>(shape);
    }
};

}  // namespace loraplex
