// Products of quantised weights by the tile registers of AMX, those with a table excepted.
//
// An input of 16 bits is 256 times a signed byte, plus an unsigned one; one of 8 bits is a signed byte. The
// sums of a group are integers and exact, so the bits are those of vectors.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "linear_amx.h"
#include "linear_group_inputs.h"
#include "linear_inputs.h"
#include "linear_quantized_block.h"
#include "linear_tiles.h"

namespace loraplex {

// Inputs of 16 bits, of which a row of a piece is all high bytes, then all low bytes, both in the order
// in which weights are unpacked, with zeros up to kMaxDepth.
template <typename W>
class SplitInputs : public Inputs<W> {
public:
    static constexpr int kNumBytes = 2;
    static constexpr std::int64_t kRowBytes = kRowStride<W> * sizeof(Input<W>);

    // x: a row of a piece
    static float number_of_group(const std::int8_t *x, int group) {
        return loraplex::number_of_group<W>(reinterpret_cast<const std::int16_t *>(x), group);
    }

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return Inputs<W>::num_bytes(num_rows, pieces) +
               amx::kTileRows * kRowBytes;
    }

    SplitInputs(void *memory, std::int64_t num_rows, const InputPieces<W> &pieces)
        : Inputs<W>(memory, num_rows, pieces), pieces_(pieces) {}

    template <typename T>
    void set_row(std::int64_t row, const T *x) {
        Inputs<W>::set_row(row, x);
        for (InputPiece piece = pieces_.start(0); piece.block < pieces_.num_blocks();
             piece = pieces_.after(piece)) {
            split(const_cast<std::int16_t *>(this->at(piece, row)), piece.depth);
        }
    }

private:
    static void split(std::int16_t *inputs, int depth) {
        std::fill(inputs + depth, inputs + kMaxDepth<W>, std::int16_t{0});
        alignas(64) std::int8_t bytes[2 * kMaxDepth<W>];
        for (int input = 0; input < kMaxDepth<W>; input += 32) {
            const __m512i pairs = ordered(_mm512_loadu_si512(inputs + input));
            _mm256_store_si256(reinterpret_cast<__m256i *>(bytes + input),
                               _mm512_cvtepi16_epi8(_mm512_srai_epi16(pairs, 8)));
            _mm256_store_si256(reinterpret_cast<__m256i *>(bytes + kMaxDepth<W> + input),
                               _mm512_cvtepi16_epi8(pairs));
        }
        std::memcpy(inputs, bytes, sizeof(bytes));
    }

    // Of Int4, the low four bits of a panel's bytes are inputs 0, 4, 1, 5 of eight, the high ones
    // 2, 6, 3, 7.
    static __m512i ordered(__m512i inputs) {
        if constexpr (std::is_same_v<W, Int4>) {
            return _mm512_shuffle_epi8(
                inputs, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13,
                                                             6, 7, 14, 15)));
        } else {
            return inputs;
        }
    }

    InputPieces<W> pieces_;
};

// Inputs of 8 bits for tiles, which read whole ones.
template <typename W>
class ByteTileInputs : public GroupInputs<W, std::int8_t> {
public:
    static constexpr int kNumBytes = 1;
    static constexpr std::int64_t kRowBytes = GroupInputs<W, std::int8_t>::kStride;
    static_assert(kByteMultiple == amx::kTileBytes);

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return GroupInputs<W, std::int8_t>::num_bytes(num_rows, pieces) +
               amx::kTileRows * kRowBytes;
    }

    using GroupInputs<W, std::int8_t>::GroupInputs;

    // x: a row of a piece
    static float number_of_group(const std::int8_t *x, int group) {
        return GroupInputs<W, std::int8_t>::scale(x, group);
    }
};

// Fewer rows of quantised weights are faster by vectors.
inline constexpr std::int64_t kFewestByteRows = 16;

// Brings into the second cache what the next call reads of two panels: a part for each of the calls that
// read the same weights, evenly over their steps.
template <typename W>
class WeightsAhead {
public:
    // weights: of the next call, from its first input on. num_bytes: of each panel.
    WeightsAhead(const W *weights, std::int64_t stride, std::int64_t num_bytes, int num_steps)
        : weights_(reinterpret_cast<const char *>(weights)),
          stride_(stride * static_cast<std::int64_t>(sizeof(W))),
          pace_(divide_up(num_bytes, std::int64_t{num_steps} * kLine) * kLine) {}

    void step() {
        for (std::int64_t line = 0; line < pace_; line += kLine) {
            __builtin_prefetch(weights_ + line, 0, 2);
            __builtin_prefetch(weights_ + stride_ + line, 0, 2);
        }
        weights_ += pace_;
    }

private:
    static constexpr std::int64_t kLine = 64;

    const char *weights_;
    std::int64_t stride_;
    std::int64_t pace_;
};

// TileInputs: SplitInputs<W>, or ByteTileInputs<W>.
template <typename W, typename TileInputs>
class AmxQuantizedProducts {
public:
    using Weight = W;
    using RowInputs = TileInputs;

    static Cut cut(std::int64_t /*num_rows*/) {
        return {{amx::kTileRows, kPanels}, kTilePanels / kPanels, kMaxAmxRows};
    }

    AmxQuantizedProducts(const PanelLayout<W> &layout, std::uint64_t /*cpu_features*/)
        : layout_(layout),
          step_inputs_(static_cast<int>(std::min<std::int64_t>(amx::kTileBytes,
                                                                layout.group_size()))) {}

    amx::Registers registers() const {
        const amx::TileShape sums = {amx::kTileBytes, amx::kTileRows};
        const amx::TileShape inputs = {static_cast<std::uint16_t>(step_inputs_), amx::kTileRows};
        const amx::TileShape weights = {amx::kTileBytes,
                                        static_cast<std::uint8_t>(step_inputs_ / 4)};
        return amx::Registers({sums, sums, sums, sums, inputs, inputs, weights, weights});
    }

    // sums [blocks][rows, padded][outputs of a block] += the share of a piece of the inputs.
    void add(const TileInputs &inputs, BlockShape /*shape*/, Range rows, TilePanels<W> panels,
             const InputPiece &piece, const InputPiece &next, float *sums) const {
        const auto num_steps = static_cast<int>(divide_up(piece.depth, step_inputs_) *
                                                divide_up(rows.size, amx::kTileRows));
        for (std::int64_t block = 0; block < panels.num_blocks; ++block) {
            WeightsAhead<W> ahead(weights_after(layout_, panels, kPanels, block, piece, next),
                                  layout_.stride(), piece.depth * kInputSize<W>, num_steps);
            add_block(inputs, rows, panels.first + block * kPanels * layout_.stride(), piece, ahead,
                      sums);
            sums += padded_rows(rows.size) * kPanels * kPanelWidth;
        }
    }

private:
    static constexpr int kPanels = 2;
    // Tiles of sums: of the only or the high bytes of each panel, then of the low ones.
    static constexpr int kNumSums = TileInputs::kNumBytes * kPanels;

    // A group of the inputs of a piece.
    struct Group {
        const std::int8_t *x;
        int number;
        const W *panel;
        const InputPiece &piece;
    };

    int group_size() const { return static_cast<int>(layout_.group_size()); }

    void add_block(const TileInputs &inputs, Range rows, const W *panel, const InputPiece &piece,
                   WeightsAhead<W> &ahead, float *sums) const {
        alignas(64) std::int8_t weights[kPanels][kMaxDepth<W> * kPanelWidth];
        for (int i = 0; i < kPanels; ++i) {
            unpack(layout_.values(panel + i * layout_.stride(), piece.block, piece.first),
                   piece.depth, weights[i]);
        }
        for (std::int64_t first = 0; first < rows.size; first += amx::kTileRows) {
            const auto *x =
                reinterpret_cast<const std::int8_t *>(inputs.at(piece, rows.first + first));
            const auto count = static_cast<int>(
                std::min<std::int64_t>(amx::kTileRows, rows.size - first));
            for (int input = 0; input < piece.depth; input += group_size()) {
                multiply(x + input, weights[0] + input * kPanelWidth,
                         std::min(group_size(), piece.depth - input), ahead);
                const Group group = {x, input / group_size(), panel, piece};
                float *target = sums + first * kPanels * kPanelWidth;
                switch (TileInputs::of_groups(layout_)) {
                    case OfGroups::kNothing:
                        add_group<OfGroups::kNothing>(group, count, target);
                        break;
                    case OfGroups::kSums:
                        add_group<OfGroups::kSums>(group, count, target);
                        break;
                    case OfGroups::kScales:
                        add_group<OfGroups::kScales>(group, count, target);
                        break;
                }
            }
        }
    }

    // As a tile has them: four inputs of each output, then the next four.
    static void unpack(const W *values, int depth, std::int8_t *target) {
        constexpr int kVectorInputs = 64 / static_cast<int>(kInputSize<W>);
        const auto *bytes = reinterpret_cast<const std::int8_t *>(values);
        for (int input = 0; input < depth; input += kVectorInputs) {
            const __m512i vector = _mm512_loadu_si512(bytes);
            bytes += 64;
            if constexpr (std::is_same_v<W, Int4>) {
                const __m512i numbers = _mm512_broadcast_i32x4(
                    _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
                const __m512i mask = _mm512_set1_epi8(0xf);
                const __m512i high = _mm512_srli_epi16(vector, 4);
                _mm512_store_si512(
                    target, _mm512_shuffle_epi8(numbers, _mm512_and_si512(vector, mask)));
                _mm512_store_si512(target + 64,
                                   _mm512_shuffle_epi8(numbers, _mm512_and_si512(high, mask)));
                target += 128;
            } else {
                alignas(64) static constexpr std::int16_t kOrder[32] = {
                    0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
                _mm512_store_si512(
                    target, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), vector));
                target += 64;
            }
        }
    }

    void multiply(const std::int8_t *x, const std::int8_t *weights, int depth,
                  WeightsAhead<W> &ahead) const {
        constexpr std::int64_t kRowBytes = TileInputs::kRowBytes;
        unrolled<kNumSums>([]<int kTile>() { amx::zero<kTile>(); });
        for (int input = 0; input < depth; input += step_inputs_) {
            const std::int8_t *values = weights + input * kPanelWidth;
            ahead.step();
            amx::load<4>(x + input, kRowBytes);
            amx::load<6>(values, amx::kTileBytes);
            amx::load<7>(values + kMaxDepth<W> * kPanelWidth, amx::kTileBytes);
            amx::multiply_signed<0, 4, 6>();
            amx::multiply_signed<1, 4, 7>();
            if constexpr (TileInputs::kNumBytes == 2) {
                amx::load<5>(x + input + kMaxDepth<W>, kRowBytes);
                amx::multiply_unsigned<2, 5, 6>();
                amx::multiply_unsigned<3, 5, 7>();
            }
        }
    }

    template <OfGroups kOfGroups>
    void add_group(const Group &group, int num_rows, float *sums) const {
        alignas(64) std::int32_t products[kNumSums][amx::kTileRows][kPanelWidth];
        unrolled<kNumSums>(
            [&]<int kTile>() { amx::store<kTile>(products[kTile], amx::kTileBytes); });
        const bool is_first = group.piece.first == 0 && group.number == 0;
        for (int panel = 0; panel < kPanels; ++panel) {
            const W *weights = group.panel + panel * layout_.stride();
            const std::int64_t input = group.piece.first + group.number * layout_.group_size();
            const Floats scale = load(layout_.scales(weights, group.piece.block, input));
            const Floats offset = kOfGroups == OfGroups::kSums
                                      ? load(layout_.offsets(weights, group.piece.block, input))
                                      : zeros();
            for (int row = 0; row < num_rows; ++row) {
                Ints sum = _mm512_load_si512(products[panel][row]);
                if constexpr (TileInputs::kNumBytes == 2) {
                    const __m512i low = _mm512_load_si512(products[kPanels + panel][row]);
                    sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), low);
                }
                float *target = sums + (row * kPanels + panel) * kPanelWidth;
                Floats share = loraplex::multiply(to_floats(sum), scale);
                if constexpr (kOfGroups != OfGroups::kNothing) {
                    const Floats number = broadcast(TileInputs::number_of_group(
                        group.x + row * TileInputs::kRowBytes, group.number));
                    share = kOfGroups == OfGroups::kScales
                                ? loraplex::multiply(share, number)
                                : subtract(share, loraplex::multiply(number, offset));
                }
                store(target, loraplex::add(is_first ? zeros() : load(target), share));
            }
        }
    }

    PanelLayout<W> layout_;
    int step_inputs_;
};

}  // namespace loraplex
