// Products of weights in super-blocks by the tile registers of AMX.
//
// A value times its group's factor has up to 14 bits: 256 times a signed byte, plus an unsigned
// one. Both are multiplied with the inputs, and the sums of a super-block are whole and exact, so
// the bits are those of vectors.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "amx.h"
#include "linear_amx.h"
#include "linear_amx_quantized.h"
#include "linear_super_blocks.h"

namespace loraplex {

// Inputs of tiles, which read whole ones.
template <typename W>
class SuperTileInputs : public SuperBlockInputs<W> {
public:
    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return SuperBlockInputs<W>::num_bytes(num_rows, pieces) +
               amx::kTileRows * SuperBlockInputs<W>::kStride;
    }

    using SuperBlockInputs<W>::SuperBlockInputs;
};

// Fewer rows are faster by vectors.
inline constexpr std::int64_t kFewestSuperRows = 10;

// While the tile registers multiply some rows, the floats of the rows before are computed: a part
// of them after each step.
template <typename W>
class AmxSuperBlockProducts {
public:
    using Weight = W;
    using RowInputs = SuperTileInputs<W>;

    // The more rows, the more panels: a piece of many rows' inputs leaves the second cache before
    // the next tile reads it.
    static Cut cut(std::int64_t num_rows) {
        const std::int64_t tile_blocks = std::clamp<std::int64_t>(num_rows / kMaxTileRows, 1, 4);
        return {{amx::kTileRows, kTilePanels}, tile_blocks, kMaxAmxRows};
    }

    AmxSuperBlockProducts(const PanelLayout<W> &layout, std::uint64_t /*cpu_features*/)
        : layout_(layout), parts_(layout.super_block()) {}

    amx::Registers registers() const {
        std::array<amx::TileShape, amx::kNumTiles> shapes;
        shapes.fill({amx::kTileBytes, amx::kTileRows});
        return amx::Registers(shapes);
    }

    // sums [blocks][rows, padded][outputs of a block] += the share of a piece of the inputs.
    void add(const RowInputs &inputs, BlockShape /*shape*/, Range rows, TilePanels<W> panels,
             const InputPiece &piece, const InputPiece &next, float *sums) const {
        alignas(64) FoldedWeights weights[kPanels];
        alignas(64) TileSums products;
        const std::int64_t block_sums = padded_rows(rows.size) * kBlockOutputs;
        const TilePanels<W> pairs = {panels.first, panels.num_blocks * kBlockPairs};
        const auto num_steps = static_cast<int>(divide_up(rows.size, amx::kTileRows) * kNumSteps);
        Tiles last = {};  // those of which the floats are not computed yet
        for (std::int64_t pair = 0; pair < pairs.num_blocks; ++pair) {
            const W *panel = panels.first + pair * kPanels * layout_.stride();
            const W *values = layout_.values(panel, piece.block, piece.first);
            const W *next_values = weights_after(layout_, pairs, kPanels, pair, piece, next);
            Tiles tiles = {};
            tiles.products = &products;
            for (int i = 0; i * kSuperInputs < piece.depth; ++i) {
                tiles.super_block = i;
                tiles.is_first = piece.first == 0 && i == 0;
                for (int p = 0; p < kPanels; ++p) {
                    tiles.weights[p] = reinterpret_cast<const std::uint8_t *>(
                        values + p * layout_.stride() + i * parts_.num_bytes());
                    fold(tiles.weights[p], weights[p]);
                }
                WeightsAhead<W> ahead(next_values + i * parts_.num_bytes(), layout_.stride(),
                                      parts_.num_bytes(), num_steps);
                for (std::int64_t row = 0; row < rows.size; row += amx::kTileRows) {
                    tiles.x = inputs.at(piece, rows.first + row);
                    tiles.sums = sums + pair / kBlockPairs * block_sums + row * kBlockOutputs +
                                 pair % kBlockPairs * kPanels * kPanelWidth;
                    multiply(tiles, weights, last, ahead);
                    last = tiles;
                }
            }
        }
        unrolled<kNumSteps>([&]<int kStep>() { add_part<kStep>(last); });
    }

private:
    static constexpr int kPanels = 2;
    static constexpr int kBlockPairs = kTilePanels / kPanels;
    static constexpr int kBlockOutputs = kTilePanels * static_cast<int>(kPanelWidth);
    static constexpr int kNumSteps = static_cast<int>(kSuperInputs) / amx::kTileBytes;
    static constexpr std::int64_t kStepSize = amx::kTileBytes * kPanelWidth;

    // Values times factors, in the order of a tile: four inputs of each output, then the next four.
    struct FoldedWeights {
        std::int8_t high[kNumSteps * kStepSize];
        std::uint8_t low[kNumSteps * kStepSize];
    };

    // Of each panel, those of high bytes and of low ones.
    using TileSums = std::int32_t[kPanels][2][amx::kTileRows][kPanelWidth];

    // Rows with two panels and a super-block.
    struct Tiles {
        const std::int8_t *x;
        const std::uint8_t *weights[kPanels];
        int super_block;
        bool is_first;
        float *sums;
        TileSums *products;
    };

    void fold(const std::uint8_t *values, FoldedWeights &weights) const {
        constexpr auto kStep = static_cast<int>(kInterleaved<W>);
        const __m512i low_bytes = _mm512_set1_epi16(0xff);
        const __m512i high_bytes = _mm512_slli_epi16(low_bytes, 8);
        const auto *factors = reinterpret_cast<const std::int8_t *>(values + parts_.factors());
        const auto group_size = static_cast<int>(layout_.group_size());
        std::int64_t target = 0;
        for (int group = 0; group < parts_.num_groups; ++group) {
            const __m512i bytes = _mm512_and_si512(load_ints(factors + group * kPanelWidth),
                                                   _mm512_set1_epi32(0xff));
            const __m512i of_evens = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 16));
            const __m512i of_odds = _mm512_slli_epi16(of_evens, 8);
            const __m512i zero =
                _mm512_maddubs_epi16(_mm512_set1_epi8(SuperBlockInputs<W>::kZero), of_evens);
            const auto fold_four = [&](__m512i fours) __attribute__((always_inline)) {
                __m512i evens = _mm512_maddubs_epi16(fours, of_evens);
                __m512i odds = _mm512_maddubs_epi16(fours, of_odds);
                if constexpr (SuperBlockInputs<W>::kZero != 0) {
                    evens = _mm512_sub_epi16(evens, zero);
                    odds = _mm512_sub_epi16(odds, zero);
                }
                _mm512_store_si512(weights.low + target,
                                   choose(low_bytes, evens, _mm512_slli_epi16(odds, 8)));
                _mm512_store_si512(weights.high + target,
                                   choose(high_bytes, odds, _mm512_srli_epi16(evens, 8)));
                target += 4 * kPanelWidth;
            };
            for (int input = 0; input < group_size; input += kStep) {
                fold_four(load_fours<W, 0>(values));
                fold_four(load_fours<W, 1>(values));
                if constexpr (kStep == 16) {
                    fold_four(load_fours<W, 2>(values));
                    fold_four(load_fours<W, 3>(values));
                }
                values += kStep * kInputSize<W>;
            }
        }
    }

    // a where the bits of mask are set, and b, which has none there
    static __m512i choose(__m512i mask, __m512i a, __m512i b) {
        return _mm512_ternarylogic_epi32(mask, a, b, 0xea);
    }

    // tiles.products. Those of the last ones are read before they are written over.
    void multiply(const Tiles &tiles, const FoldedWeights (&weights)[kPanels],
                  const Tiles &last, WeightsAhead<W> &ahead) const {
        unrolled<2 * kPanels>([]<int kTile>() { amx::zero<kTile>(); });
        unrolled<kNumSteps>([&]<int kStep>() {
            constexpr int kX = 4, kHigh = 5, kLow = 6;
            const std::int8_t *x =
                tiles.x + tiles.super_block * kSuperInputs + kStep * amx::kTileBytes;
            amx::load<kX>(x, RowInputs::kStride);
            unrolled<kPanels>([&]<int kPanel>() {
                amx::load<kHigh>(weights[kPanel].high + kStep * kStepSize, amx::kTileBytes);
                amx::multiply_signed<2 * kPanel, kX, kHigh>();
                amx::load<kLow>(weights[kPanel].low + kStep * kStepSize, amx::kTileBytes);
                amx::multiply_signed_by_unsigned<2 * kPanel + 1, kX, kLow>();
            });
            for (int row = 0; row < amx::kTileRows; ++row) {
                __builtin_prefetch(x + (amx::kTileRows + row) * RowInputs::kStride);
            }
            ahead.step();
            add_part<kStep>(last);
        });
        unrolled<2 * kPanels>([&]<int kTile>() {
            amx::store<kTile>((*tiles.products)[kTile / 2][kTile % 2], amx::kTileBytes);
        });
    }

    // What a step computes of the floats: half of the rows of a panel. Rows that are none have memory
    // as well.
    template <int kStep>
    __attribute__((always_inline)) void add_part(const Tiles &tiles) const {
        constexpr int kRows = amx::kTileRows * kPanels / kNumSteps;
        constexpr int kPanel = kStep * kPanels / kNumSteps;
        constexpr int kFirst = kStep * kRows % amx::kTileRows;
        if (tiles.x == nullptr) {
            return;
        }
        switch (parts_.has_minima ? parts_.num_groups / 2 : 0) {
            case 0:
                return add_rows<kPanel, 0, kRows>(tiles, kFirst);
            case 4:
                return add_rows<kPanel, 4, kRows>(tiles, kFirst);
            default:
                return add_rows<kPanel, 8, kRows>(tiles, kFirst);
        }
    }

    // kPairs: of groups that have minima
    template <int kPanel, int kPairs, int kRows>
    void add_rows(const Tiles &tiles, int first) const {
        const std::uint8_t *panel = tiles.weights[kPanel];
        const auto floats = [panel](std::int64_t place) {
            return load(reinterpret_cast<const float *>(panel + place));
        };
        const Floats scale = floats(parts_.kScales);
        const Floats minimum_scale = kPairs > 0 ? floats(parts_.minimum_scales()) : zeros();
        Pairs minima[std::max(kPairs, 1)];
#pragma GCC unroll 8
        for (int pair = 0; pair < kPairs; ++pair) {
            minima[pair] = load_pairs(reinterpret_cast<const std::int8_t *>(
                panel + parts_.minima() + pair * 2 * kPanelWidth));
        }
        const auto *high = (*tiles.products)[kPanel][0] + first;
        const auto *low = (*tiles.products)[kPanel][1] + first;
        const std::int8_t *x = tiles.x + first * RowInputs::kStride;
        float *sums = tiles.sums + first * kBlockOutputs + kPanel * kPanelWidth;
        const int super_block = tiles.super_block;
        const bool is_first = tiles.is_first;
        for (int row = 0; row < kRows; ++row) {
            const Ints total = loraplex::add(
                _mm512_slli_epi32(_mm512_load_si512(high[row]), 8), _mm512_load_si512(low[row]));
            Floats share = loraplex::multiply(to_floats(total), scale);
            if constexpr (kPairs > 0) {
                Ints sum = zero_ints();
#pragma GCC unroll 8
                for (int pair = 0; pair < kPairs; ++pair) {
                    sum = VnniDot{}(sum, broadcast_pair(RowInputs::sums(x, super_block, pair)),
                                    minima[pair]);
                }
                share = subtract(share, loraplex::multiply(to_floats(sum), minimum_scale));
            }
            share = loraplex::multiply(share, broadcast(RowInputs::scale(x, super_block)));
            store(sums, loraplex::add(is_first ? zeros() : load(sums), share));
            x += RowInputs::kStride;
            sums += kBlockOutputs;
        }
    }

    PanelLayout<W> layout_;
    SuperBlockLayout<W> parts_;
};

}  // namespace loraplex
