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

// Cuts products into tiles; add() multiplies rows of one with two or four panels.
class AmxProducts {
public:
    using Weight = Bfloat16;
    using RowInputs = TileInputs;

    static Cut cut(std::int64_t num_rows) {
        return num_rows <= amx::kTileRows ? Cut{{amx::kTileRows, 4}, 1, kMaxAmxRows}
                                          : Cut{{2 * amx::kTileRows, 2}, 2, kMaxAmxRows};
    }

    AmxProducts(const PanelLayout<Bfloat16> &layout, std::uint64_t /*cpu_features*/)
        : layout_(layout) {}

    amx::Registers registers() const {
        std::array<amx::TileShape, amx::kNumTiles> shapes;
        shapes.fill({amx::kTileBytes, amx::kTileRows});
        return amx::Registers(shapes);
    }

    // sums [blocks][rows, padded][outputs of a block] += the share of a piece of the inputs.
    void add(const TileInputs &inputs, BlockShape shape, Range rows, TilePanels<Bfloat16> panels,
             const InputPiece &piece, const InputPiece & /*next*/, float *sums) const {
        const std::int64_t block_sums = padded_rows(rows.size) * shape.panels * kPanelWidth;
        for (std::int64_t first = 0; first < rows.size; first += shape.rows) {
            Step step = {inputs.at(piece, rows.first + first),
                         layout_.values(panels.first, piece.block, piece.first),
                         layout_.stride(),
                         piece.depth,
                         sums + first * shape.panels * kPanelWidth,
                         piece.first == 0};
            for (std::int64_t block = 0; block < panels.num_blocks; ++block) {
                if (shape.panels == 4) {
                    multiply<1, 4>(step);
                } else if (rows.size - first <= amx::kTileRows) {
                    multiply<1, 2>(step);
                } else {
                    multiply<2, 2>(step);
                }
                step.values += shape.panels * layout_.stride();
                step.sums += block_sums;
            }
        }
    }

private:
    struct Step {
        const Bfloat16 *x;
        const Bfloat16 *values;
        std::int64_t stride;
        int depth;
        float *sums;
        bool is_first;  // of the sums' pieces
    };

    static constexpr int kStepSize = kStepInputs * static_cast<int>(kPanelWidth);

    template <int kRowTiles, int kPanels>
    static void multiply(const Step &step) {
        constexpr std::int64_t kSumsStride = kPanels * kPanelWidth * sizeof(float);
        const auto target = [&](int tile) {
            return step.sums + (tile / kPanels * amx::kTileRows * kPanels + tile % kPanels) *
                                   kPanelWidth;
        };
        unrolled<kRowTiles * kPanels>([&]<int kTile>() {
            if (step.is_first) {
                amx::zero<kTile>();
            } else {
                amx::load<kTile>(target(kTile), kSumsStride);
            }
        });
        const int whole = step.depth / kStepInputs * kStepInputs;
        for (int input = 0; input < whole; input += kStepInputs) {
            const Bfloat16 *values = step.values + input * kPanelWidth;
            if constexpr (kRowTiles == 1) {
                prefetch<kPanels>(values, step.stride);
            }
            add_step<kRowTiles, kPanels>(step.x + input, values, step.stride);
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
            [&]<int kTile>() { amx::store<kTile>(target(kTile), kSumsStride); });
    }

    template <int kRowTiles, int kPanels>
    __attribute__((always_inline)) static void add_step(const Bfloat16 *x, const Bfloat16 *values,
                                                        std::int64_t stride) {
        constexpr std::int64_t kRowBytes = TileInputs::kStride * sizeof(Bfloat16);
        constexpr int kFirstB = kNumSums + kRowTiles;
        unrolled<kRowTiles>([&]<int kRow>() {
            amx::load<kNumSums + kRow>(x + kRow * amx::kTileRows * TileInputs::kStride, kRowBytes);
        });
        unrolled<kPanels>([&]<int kPanel>() {
            constexpr int kB = kFirstB + kPanel % (amx::kNumTiles - kFirstB);
            amx::load<kB>(values + kPanel * stride, amx::kTileBytes);
            unrolled<kRowTiles>([&]<int kRow>() {
                amx::multiply_bfloat16<kRow * kPanels + kPanel, kNumSums + kRow, kB>();
            });
        });
    }

    template <int kPanels>
    static void prefetch(const Bfloat16 *values, std::int64_t stride) {
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma GCC unroll 16
            for (int line = 0; line < kStepSize; line += 32) {
                __builtin_prefetch(values + panel * stride + kStepSize + line);
            }
        }
    }

    PanelLayout<Bfloat16> layout_;
};

}  // namespace loraplex
