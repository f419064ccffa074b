// Products of bfloat16 inputs and weights by the tile registers of AMX.
//
// Tiles are always full: rows that a product lacks are whatever the memory holds, and their sums are
// not read. So a row's bits do not depend on the others.
//
// The order of addition is that of the instruction (amx.h), 32 inputs after 32. It differs
// from that of vectors, so where a CPU has AMX, all such products are made in it: those of few rows
// by vectors, because a tile costs the same with one row as with 16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "linear_inputs.h"
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "loraplex/abi.h"

namespace loraplex {

// The weights of a tile are read once for so many rows.
inline constexpr std::int64_t kMaxAmxRows = 512;

// Blocks of two panels in a tile of many rows: so often the rows' inputs are read from the second cache
// before those of the next piece come from the third one.
inline constexpr std::int64_t kTileBlocks = 32;

// Inputs of one multiplication of bfloat16.
inline constexpr int kStepInputs = amx::kTileBytes / static_cast<int>(sizeof(Bfloat16));

// Inputs of tiles, which read whole ones.
class TileInputs : public PairInputs<512> {
public:
    static_assert(kMultiple == kStepInputs);

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<Bfloat16> &pieces) {
        return PairInputs::num_bytes(num_rows, pieces) +
               static_cast<std::size_t>(amx::kTileRows * kStride) * sizeof(Bfloat16);
    }

    using PairInputs::PairInputs;
};

// body.operator()<i>() for i from 0 to kCount - 1
template <int kCount, typename Body>
__attribute__((always_inline)) inline void unrolled(const Body &body) {
    [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
        (body.template operator()<kIndices>(), ...);
    }(std::make_integer_sequence<int, kCount>());
}

// Of the registers, the first ones are for sums.
inline constexpr int kNumSums = 4;

// Subnormal numbers count as 0, as they do for tiles.
class FlushSubnormals {
public:
    FlushSubnormals() { _mm_setcsr(saved_ | kFlushResults | kFlushOperands); }
    FlushSubnormals(const FlushSubnormals &) = delete;
    FlushSubnormals &operator=(const FlushSubnormals &) = delete;
    ~FlushSubnormals() { _mm_setcsr(saved_); }

private:
    static constexpr unsigned kFlushResults = 0x8000, kFlushOperands = 0x40;
    unsigned saved_ = _mm_getcsr();
};

// The innermost loop of few rows in the order of a tile: the inputs with even numbers are a chain of
// multiply-adds, those with odd ones another; after 32 inputs both are added, and then to the sum.
template <int kRows, int kPanels>
struct PairedBlock {
    static void run(const float *x, const BlockWeights<Bfloat16> &weights, int depth,
                    float *sums_in_memory, bool first) {
        const Bfloat16 *values = weights.values;
        for (int input = 0; input < depth; input += kStepInputs) {
            Floats evens[kRows][kPanels];
            Floats odds[kRows][kPanels];
            clear(evens);
            clear(odds);
            const int end = std::min(depth, input + kStepInputs);
            for (int i = input; i < end; i += 2) {
                prefetch<kPanels, Bfloat16>(weights.ahead, i / 2, weights.stride);
                multiply(evens, x + i, [&](int panel) __attribute__((always_inline)) {
                    return load_firsts(values + panel * weights.stride);
                });
                if (i + 1 < end) {
                    multiply(odds, x + i + 1, [&](int panel) __attribute__((always_inline)) {
                        return load_seconds(values + panel * weights.stride);
                    });
                }
                values += 2 * kPanelWidth;
            }
            const bool starts = first && input == 0;
#pragma GCC unroll 16
            for (int i = 0; i < kRows * kPanels; ++i) {
                float *target = sums_in_memory + i * kLanes;
                const Floats sum = loraplex::add(evens[i / kPanels][i % kPanels],
                                                 odds[i / kPanels][i % kPanels]);
                store(target, loraplex::add(starts ? zeros() : load(target), sum));
            }
        }
    }

private:
    __attribute__((always_inline)) static void clear(Floats (&sums)[kRows][kPanels]) {
#pragma GCC unroll 16
        for (int i = 0; i < kRows * kPanels; ++i) {
            sums[i / kPanels][i % kPanels] = zeros();
        }
    }

    template <typename Weight>
    __attribute__((always_inline)) static void multiply(Floats (&sums)[kRows][kPanels],
                                                        const float *x, const Weight &weight) {
        outer_product(
            sums, [x](int row) { return broadcast(x[row * kRowStride<Bfloat16>]); }, weight,
            [](Floats a, Floats b, Floats c) { return multiply_add(a, b, c); });
    }
};

// Products of few rows, with the bits of AmxProducts.
class PairedProducts : public VectorProducts<Bfloat16> {
public:
    static constexpr std::int64_t kMaxRows = 2;

    static Cut cut(std::int64_t num_rows) {
        return {kShapes.of(std::min(num_rows, kMaxRows)), 1, kMaxRows};
    }

    PairedProducts(const PanelLayout<Bfloat16> &layout, std::uint64_t cpu_features)
        : VectorProducts(layout, cpu_features, &function) {}

    FlushSubnormals registers() const { return {}; }

private:
    static BlockFunction<Bfloat16> function(BlockShape shape, std::uint64_t /*cpu_features*/) {
        if (shape.rows == 2) {
            return &PairedBlock<2, 4>::run;
        }
        return shape.panels == 8 ? &PairedBlock<1, 8>::run : &PairedBlock<1, 4>::run;
    }
};

// Brings weights into a cache while others are multiplied, evenly over the steps.
class PanelsAhead {
public:
    // values: in the first panel, total of them; num_values: of each panel in a step.
    PanelsAhead(const Bfloat16 *values, std::int64_t total, std::int64_t stride,
                std::int64_t num_values)
        : values_(values), end_(values + total), stride_(stride), num_values_(num_values) {}

    // kLocality: 3 for the first cache, 2 for the second one.
    template <int kPanels, int kLocality>
    __attribute__((always_inline)) void step() {
        const Bfloat16 *end = std::min(values_ + num_values_, end_);
        for (; values_ < end; values_ += kLineValues) {
#pragma GCC unroll 4
            for (int panel = 0; panel < kPanels; ++panel) {
                __builtin_prefetch(values_ + panel * stride_, 0, kLocality);
            }
        }
    }

    static constexpr std::int64_t kLineValues = 64 / sizeof(Bfloat16);

private:
    const Bfloat16 *values_;
    const Bfloat16 *end_;
    std::int64_t stride_;
    std::int64_t num_values_;
};

// Cuts products into tiles; add() multiplies rows of one with two or four panels.
class AmxProducts {
public:
    using Weight = Bfloat16;
    using RowInputs = TileInputs;

    static Cut cut(std::int64_t num_rows) {
        return num_rows <= amx::kTileRows
                   ? Cut{{amx::kTileRows, 4}, 1, kMaxAmxRows, true}
                   : Cut{{2 * amx::kTileRows, 2}, num_rows <= 2 * amx::kTileRows ? 1 : kTileBlocks,
                         kMaxAmxRows, true};
    }

    AmxProducts(const PanelLayout<Bfloat16> &layout, std::uint64_t /*cpu_features*/)
        : layout_(layout) {}

    amx::Registers registers() const {
        std::array<amx::TileShape, amx::kNumTiles> shapes;
        shapes.fill({amx::kTileBytes, amx::kTileRows});
        return amx::Registers(shapes);
    }

    // sums [panels][rows, padded][kPanelWidth] += the share of a piece of the inputs.
    void add(const TileInputs &inputs, BlockShape shape, Range rows, TilePanels<Bfloat16> panels,
             const InputPiece &piece, const InputPiece &next, float *sums) const {
        const std::int64_t panel_sums = padded_rows(rows.size) * kPanelWidth;
        const std::int64_t num_row_blocks = divide_up(rows.size, shape.rows);
        for (std::int64_t block = 0; block < panels.num_blocks; ++block) {
            const Bfloat16 *values = layout_.values(
                panels.first + block * shape.panels * layout_.stride(), piece.block, piece.first);
            // One block of rows waits for the memory; more of them read the weights from the first
            // cache while the next ones come into the second.
            PanelsAhead ahead(
                num_row_blocks == 1
                    ? values + kStepsAhead * kStepSize
                    : weights_after(layout_, panels, shape.panels, block, piece, next),
                piece.depth * kPanelWidth, layout_.stride(),
                divide_up(kStepSize, num_row_blocks * PanelsAhead::kLineValues) *
                    PanelsAhead::kLineValues);
            for (std::int64_t first = 0; first < rows.size; first += shape.rows) {
                Step step = {inputs.at(piece, rows.first + first),
                             values,
                             layout_.stride(),
                             piece.depth,
                             sums + first * kPanelWidth,
                             panel_sums,
                             piece.first == 0};
                if (shape.panels == 4) {
                    multiply<1, 4, true>(step, ahead);
                } else if (num_row_blocks == 1) {
                    multiply<2, 2, true>(step, ahead);
                } else if (rows.size - first <= amx::kTileRows) {
                    multiply<1, 2, false>(step, ahead);
                } else {
                    multiply<2, 2, false>(step, ahead);
                }
            }
            sums += panel_sums * shape.panels;
        }
    }

private:
    static constexpr std::int64_t kStepsAhead = 2;

    struct Step {
        const Bfloat16 *x;
        const Bfloat16 *values;
        std::int64_t stride;
        int depth;
        float *sums;
        std::int64_t panel_sums;  // from panel to panel
        bool is_first;  // of the sums' pieces
    };

    static constexpr int kStepSize = kStepInputs * static_cast<int>(kPanelWidth);

    template <int kRowTiles, int kPanels, bool kIsOnlyBlock>
    static void multiply(const Step &step, PanelsAhead &ahead) {
        const auto target = [&](int tile) {
            return step.sums + tile / kPanels * amx::kTileRows * kPanelWidth +
                   tile % kPanels * step.panel_sums;
        };
        unrolled<kRowTiles * kPanels>([&]<int kTile>() {
            if (step.is_first) {
                amx::zero<kTile>();
            } else {
                amx::load<kTile>(target(kTile), amx::kTileBytes);
            }
        });
        const int whole = step.depth / kStepInputs * kStepInputs;
        for (int input = 0; input < whole; input += kStepInputs) {
            ahead.step<kPanels, kIsOnlyBlock ? 3 : 2>();
            if constexpr (!kIsOnlyBlock) {
                prefetch_sums<kPanels>(step, input / kStepInputs);
            }
            add_step<kRowTiles, kPanels>(step.x + input, step.values + input * kPanelWidth,
                                         step.stride);
        }
        if (whole < step.depth) {
            // What comes after a panel's values is no number, and 0 times that need not be 0.
            alignas(64) Bfloat16 rest[kPanels * kStepSize] = {};
            const std::int64_t size = (step.depth - whole + 1) / 2 * 2 * kPanelWidth;
            for (int panel = 0; panel < kPanels; ++panel) {
                std::copy_n(step.values + panel * step.stride + whole * kPanelWidth, size,
                            rest + panel * kStepSize);
            }
            add_step<kRowTiles, kPanels>(step.x + whole, rest, kStepSize);
        }
        unrolled<kRowTiles * kPanels>(
            [&]<int kTile>() { amx::store<kTile>(target(kTile), amx::kTileBytes); });
    }

    // The sums of the next block of rows, as many of a step as 16 steps need.
    template <int kPanels>
    __attribute__((always_inline)) static void prefetch_sums(const Step &step, int number) {
        constexpr int kNumLines = 2 * amx::kTileRows / (TileInputs::kDepth / kStepInputs);
        const float *sums = step.sums + (2 * amx::kTileRows + number * kNumLines) * kPanelWidth;
#pragma GCC unroll 4
        for (int i = 0; i < kPanels * kNumLines; ++i) {
            __builtin_prefetch(sums + i / kNumLines * step.panel_sums +
                               i % kNumLines * kPanelWidth);
        }
    }

    template <int kRowTiles, int kPanels>
    __attribute__((always_inline)) static void add_step(const Bfloat16 *x, const Bfloat16 *values,
                                                        std::int64_t stride) {
        constexpr std::int64_t kRowBytes = TileInputs::kStride * sizeof(Bfloat16);
        constexpr int kFirstB = kNumSums + kRowTiles;
        amx::stay_awake();
        const auto load_row_tile = [&]<int kRow>() {
            if constexpr (kRowTiles == 1) {
                amx::load<kNumSums + kRow>(x, kRowBytes);
            } else {
                amx::load_once<kNumSums + kRow>(
                    x + kRow * amx::kTileRows * TileInputs::kStride, kRowBytes);
            }
        };
        load_row_tile.template operator()<0>();
        unrolled<kPanels>([&]<int kPanel>() {
            constexpr int kB = kFirstB + kPanel % (amx::kNumTiles - kFirstB);
            amx::load<kB>(values + kPanel * stride, amx::kTileBytes);
            amx::multiply_bfloat16<kPanel, kNumSums, kB>();
        });
        if constexpr (kRowTiles == 2) {
            static_assert(kPanels <= amx::kNumTiles - kFirstB);
            load_row_tile.template operator()<1>();
            unrolled<kPanels>([&]<int kPanel>() {
                amx::multiply_bfloat16<kPanels + kPanel, kNumSums + 1, kFirstB + kPanel>();
            });
        }
    }

    PanelLayout<Bfloat16> layout_;
};

}  // namespace loraplex
