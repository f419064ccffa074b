// Products of quantised weights by the tile registers of AMX, those with a table excepted.
//
// An input of 16 bits is 256 times a signed byte, plus an unsigned one; one of 8 bits is a signed byte. The
// sums of a group are integers and exact, so the bits are those of vectors.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
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
    // What sums begin with.
    static constexpr std::int32_t kStart = 0;

    // products: of the high bytes; those of the low ones are low_products further.
    static Floats sum(const std::int32_t *products, int low_products) {
        const __m512i high = _mm512_load_si512(products);
        const __m512i low = _mm512_load_si512(products + low_products);
        return to_floats(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    }

    // x: a row of a piece. What it has for each group, float32.
    static const std::int8_t *numbers(const std::int8_t *x) {
        return x + kMaxDepth<W> * sizeof(Input<W>);
    }

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return Inputs<W>::num_bytes(num_rows, pieces) +
               2 * amx::kTileRows * kRowBytes;
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
    using Base = GroupInputs<W, std::int8_t>;

public:
    static constexpr int kNumBytes = 1;
    static constexpr std::int64_t kRowBytes = Base::kStride;
    static_assert(kByteMultiple == amx::kTileBytes);
    // What sums begin with: as a float 1.5 * 2^23, of which whole numbers up to 2^22 change the last
    // bits alone. A subtraction makes them floats: while tiles are in use, the port that multiplies and
    // converts is the bottleneck.
    static constexpr std::int32_t kStart = 0x4b400000;
    static constexpr std::int64_t kMaxGroupSize = (1 << 22) / (1 << 14);

    static Floats sum(const std::int32_t *products, int /*low_products*/) {
        return loraplex::add(load(reinterpret_cast<const float *>(products)),
                             broadcast(-std::bit_cast<float>(kStart)));
    }

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return Base::num_bytes(num_rows, pieces) + 2 * amx::kTileRows * kRowBytes;
    }

    using Base::Base;

    // x: a row of a piece
    static const std::int8_t *numbers(const std::int8_t *x) { return x + Base::kDepth; }
};

// Fewer rows of quantised weights are faster by vectors.
inline constexpr std::int64_t kFewestByteRows = 16;

// Brings into the second cache what the next call reads of two panels, evenly over the steps of this one:
// the memory has work all the time.
template <typename W>
class WeightsAhead {
public:
    // weights: of the next call, from its first input on. num_bytes: of each panel.
    WeightsAhead(const W *weights, std::int64_t stride, std::int64_t num_bytes,
                 std::int64_t num_steps)
        : weights_(reinterpret_cast<const char *>(weights)),
          stride_(stride * static_cast<std::int64_t>(sizeof(W))),
          pace_(divide_up(num_bytes, num_steps)) {}

    __attribute__((always_inline)) void step() {
        const char *end = weights_ + pace_;
        const char *line = weights_;
        do {
            __builtin_prefetch(line, 0, 2);
            __builtin_prefetch(line + stride_, 0, 2);
            line += kLine;
        } while (line < end);
        weights_ = end;
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

    static Cut cut(std::int64_t num_rows) {
        // With many rows, so often their inputs are read from the second cache.
        return {{amx::kTileRows, kPanels}, num_rows <= 2 * amx::kTileRows ? 2 : 8, kMaxAmxRows};
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
        switch (TileInputs::of_groups(layout_)) {
            case OfGroups::kNothing:
                return add_blocks<OfGroups::kNothing>(inputs, rows, panels, piece, next, sums);
            case OfGroups::kSums:
                return add_blocks<OfGroups::kSums>(inputs, rows, panels, piece, next, sums);
            case OfGroups::kScales:
                return add_blocks<OfGroups::kScales>(inputs, rows, panels, piece, next, sums);
        }
    }

private:
    static constexpr int kPanels = 2;
    // Rows of a turn: two tiles of inputs, of which two bytes take both.
    static constexpr int kMaxRows = 2 * amx::kTileRows / TileInputs::kNumBytes;
    static constexpr int kNumSums = 4;
    static constexpr int kProducts = amx::kTileRows * static_cast<int>(kPanelWidth);  // of a tile

    // A group of the rows of two tiles of inputs, or of the last one.
    struct Turn {
        const std::int8_t *x;
        const std::int8_t *weights;
        int depth;
        // To add the products:
        const std::int8_t *numbers;
        const float *scales;  // of the first panel
        const float *offsets;
        float *sums;
    };

    // While tiles multiply a turn, the products of the last one go to memory, and those of the one before
    // are added: in small parts, as the CPU looks ahead for a few hundred instructions only. What the
    // parts need are arguments, which stay in registers: an object would be read again after each tile.
    template <OfGroups kOfGroups>
    class Pipeline {
    public:
        explicit Pipeline(const AmxQuantizedProducts &owner)
            : step_inputs_(owner.step_inputs_),
              scales_stride_(owner.layout_.stride() / static_cast<std::int64_t>(sizeof(float))) {}

        // kTiles: of sums. All turns up to finish() have as many.
        template <int kTiles>
        __attribute__((always_inline)) void next(const Turn &turn, WeightsAhead<W> &ahead) {
            if (num_turns_ < 2) {
                if (num_turns_ == 1) {
                    store_made<kTiles>();
                }
                multiply_rest<kTiles>(turn, 0, ahead);
                ++num_turns_;
            } else if (turn.depth <= step_inputs_) {
                multiply<kTiles, 2>(turn, ahead);
            } else {
                multiply<kTiles, 1>(turn, ahead);
            }
            advance();
            Turn &made = turns_[half_];
            made.numbers = turn.numbers;
            made.scales = turn.scales;
            made.offsets = turn.offsets;
            made.sums = turn.sums;
        }

        template <int kTiles>
        void finish() {
            if (num_turns_ == 2) {
                add<kTiles>();
            }
            if (num_turns_ >= 1) {
                store_made<kTiles>();
                advance();
                add<kTiles>();
            }
            num_turns_ = 0;
        }

    private:
        void advance() { half_ ^= 1; }

        // The last turn's, and those of the one before it.
        std::int32_t *made() { return products_ + half_ * kNumSums * kProducts; }
        const std::int32_t *stored() const {
            return products_ + (half_ ^ 1) * kNumSums * kProducts;
        }

        // kUnits: so many are added after a multiplication of tiles.
        template <int kTiles, int kUnits>
        __attribute__((noinline)) void multiply(const Turn &turn, WeightsAhead<W> &ahead) {
            const Turn &last = turns_[half_ ^ 1];
            const Floats scales = load(last.scales), next_scales = load(last.scales + scales_stride_);
            Floats offsets = zeros(), next_offsets = zeros();
            if constexpr (kOfGroups == OfGroups::kSums) {
                offsets = load(last.offsets);
                next_offsets = load(last.offsets + scales_stride_);
            }
            load_step<kTiles>(turn.x, turn.weights);
            multiply_part<kTiles, kUnits, 0>(made(), ahead, stored(), last.numbers, last.sums, scales,
                                             next_scales, offsets, next_offsets);
            if constexpr (kUnits == 1) {
                load_step<kTiles>(turn.x + step_inputs_, turn.weights + step_inputs_ * kPanelWidth);
                multiply_part<kTiles, kUnits, kTiles>(made(), ahead, stored(), last.numbers, last.sums,
                                                      scales, next_scales, offsets, next_offsets);
                multiply_rest<kTiles>(turn, 2 * step_inputs_, ahead);
            }
        }

        template <int kTiles>
        void multiply_rest(const Turn &turn, int input, WeightsAhead<W> &ahead) {
            if (input == 0) {
                unrolled<kTiles>([]<int kTile>() { start<kTile>(); });
            }
            for (; input < turn.depth; input += step_inputs_) {
                load_step<kTiles>(turn.x + input, turn.weights + input * kPanelWidth);
                unrolled<kTiles>([&]<int kTile>() {
                    multiply_tile<kTile>();
                    ahead.step();
                });
            }
        }

        // The tiles of a step from kPart on.
        template <int kTiles, int kUnits, int kPart>
        __attribute__((always_inline)) static void multiply_part(
            std::int32_t *made, WeightsAhead<W> &ahead, const std::int32_t *products,
            const std::int8_t *numbers, float *sums, Floats scales, Floats next_scales, Floats offsets,
            Floats next_offsets) {
            constexpr int kTile = kPart % kTiles;
            constexpr int kUnitRows = kMaxRows / (2 * kNumSums);
            if constexpr (kPart < kTiles) {
                store<kTile>(made);
                start<kTile>();
            }
            multiply_tile<kTile>();
            ahead.step();
            add_rows<kPart * kUnits * kUnitRows, kUnits * kUnitRows>(
                products, numbers, sums, scales, next_scales, offsets, next_offsets);
            if constexpr (kTile + 1 < kTiles) {
                multiply_part<kTiles, kUnits, kPart + 1>(made, ahead, products, numbers, sums, scales,
                                                         next_scales, offsets, next_offsets);
            }
        }

        template <int kTiles>
        __attribute__((always_inline)) static void load_step(const std::int8_t *x,
                                                             const std::int8_t *weights) {
            constexpr std::int64_t kRowBytes = TileInputs::kRowBytes;
            constexpr std::int64_t kSecond = TileInputs::kNumBytes == 2
                                                 ? std::int64_t{kMaxDepth<W>}
                                                 : amx::kTileRows * kRowBytes;
            amx::load_once<4>(x, kRowBytes);
            amx::load<6>(weights, amx::kTileBytes);
            amx::load<7>(weights + kMaxDepth<W> * kPanelWidth, amx::kTileBytes);
            if constexpr (kTiles == kNumSums) {
                amx::load_once<5>(x + kSecond, kRowBytes);
            }
        }

        // To clear a tile would take longer: that waits for the register's last use.
        template <int kTile>
        __attribute__((always_inline)) static void start() {
            amx::load<kTile>(kStart.data(), 0);
        }

        template <int kTile>
        __attribute__((always_inline)) static void multiply_tile() {
            constexpr int kA = 4 + kTile / kPanels;
            constexpr int kB = 6 + kTile % kPanels;
            if constexpr (TileInputs::kNumBytes == 2 && kA == 5) {
                amx::multiply_unsigned<kTile, kA, kB>();
            } else {
                amx::multiply_signed<kTile, kA, kB>();
            }
        }

        // [panel][two tiles of inputs][row][output]
        template <int kTile>
        __attribute__((always_inline)) static void store(std::int32_t *products) {
            amx::store<kTile>(products + (kTile % kPanels * 2 + kTile / kPanels) * kProducts,
                              amx::kTileBytes);
        }

        template <int kTiles>
        void store_made() {
            std::int32_t *const target = made();
            unrolled<kTiles>([target]<int kTile>() { store<kTile>(target); });
        }

        template <int kTiles>
        void add() {
            const Turn &last = turns_[half_ ^ 1];
            const bool has_offsets = kOfGroups == OfGroups::kSums;
            add_rows<0, kMaxRows * kTiles / kNumSums>(
                stored(), last.numbers, last.sums, load(last.scales),
                load(last.scales + scales_stride_), has_offsets ? load(last.offsets) : zeros(),
                has_offsets ? load(last.offsets + scales_stride_) : zeros());
        }

        template <int kRow, int kRows>
        __attribute__((always_inline)) static void add_rows(const std::int32_t *products,
                                                            const std::int8_t *numbers, float *sums,
                                                            Floats scales, Floats next_scales,
                                                            Floats offsets, Floats next_offsets) {
            Floats number = zeros();
            if constexpr (kOfGroups != OfGroups::kNothing) {
                float of_row;
                std::memcpy(&of_row, numbers + kRow * TileInputs::kRowBytes, sizeof(of_row));
                number = broadcast(of_row);
            }
            add_panel<kRow, 0>(products, sums, number, scales, offsets);
            add_panel<kRow, 1>(products, sums, number, next_scales, next_offsets);
            if constexpr (kRows > 1) {
                add_rows<kRow + 1, kRows - 1>(products, numbers, sums, scales, next_scales, offsets,
                                              next_offsets);
            }
        }

        template <int kRow, int kPanel>
        __attribute__((always_inline)) static void add_panel(const std::int32_t *products,
                                                             float *sums, Floats number,
                                                             Floats scales, Floats offsets) {
            Floats share = loraplex::multiply(
                TileInputs::sum(products + kPanel * 2 * kProducts + kRow * kPanelWidth, kProducts),
                scales);
            if constexpr (kOfGroups == OfGroups::kScales) {
                share = loraplex::multiply(share, number);
            } else if constexpr (kOfGroups == OfGroups::kSums) {
                share = subtract(share, loraplex::multiply(number, offsets));
            }
            float *target = sums + (kRow * kPanels + kPanel) * kPanelWidth;
            loraplex::store(target, loraplex::add(load(target), share));
        }

        const int step_inputs_;
        const std::int64_t scales_stride_;
        int num_turns_ = 0;
        // Of the last turn, the products of which are in the registers, and of the one before it, the
        // products of which are in memory.
        int half_ = 0;
        Turn turns_[2];
        alignas(64) std::int32_t products_[2 * kNumSums * kProducts];
    };

    template <OfGroups kOfGroups>
    void add_blocks(const TileInputs &inputs, Range rows, TilePanels<W> panels,
                    const InputPiece &piece, const InputPiece &next, float *sums) const {
        const auto size = static_cast<int>(layout_.group_size());
        // One for each tile that is unpacked or multiplied.
        const std::int64_t num_steps =
            kPanels * (divide_up(piece.depth, amx::kTileBytes) +
                       divide_up(piece.depth, step_inputs_) * TileInputs::kNumBytes *
                           divide_up(rows.size, amx::kTileRows));
        const std::int64_t block_sums = padded_rows(rows.size) * kPanels * kPanelWidth;
        if (piece.first == 0) {
            std::fill_n(sums, panels.num_blocks * block_sums, 0.0f);
        }
        alignas(64) std::int8_t weights[kPanels][kMaxDepth<W> * kPanelWidth];
        Pipeline<kOfGroups> pipeline(*this);
        for (std::int64_t block = 0; block < panels.num_blocks; ++block) {
            const W *panel = panels.first + block * kPanels * layout_.stride();
            WeightsAhead<W> ahead(weights_after(layout_, panels, kPanels, block, piece, next),
                                  layout_.stride(), piece.depth * kInputSize<W>, num_steps);
            for (int i = 0; i < kPanels; ++i) {
                unpack(layout_.values(panel + i * layout_.stride(), piece.block, piece.first),
                       piece.depth, weights[i], ahead);
            }
            for (std::int64_t first = 0; first < rows.size; first += kMaxRows) {
                const bool is_half =
                    TileInputs::kNumBytes == 1 && rows.size - first <= amx::kTileRows;
                if (is_half) {
                    pipeline.template finish<kNumSums>();
                }
                Turn turn;
                turn.weights = weights[0];
                turn.x = reinterpret_cast<const std::int8_t *>(inputs.at(piece, rows.first + first));
                turn.numbers = TileInputs::numbers(turn.x);
                turn.scales = layout_.scales(panel, piece.block, piece.first);
                turn.offsets = layout_.offsets(panel, piece.block, piece.first);
                turn.sums = sums + first * kPanels * kPanelWidth;
                for (int input = 0; input < piece.depth; input += size) {
                    turn.depth = std::min(size, piece.depth - input);
                    if (is_half) {
                        pipeline.template next<kNumSums / 2>(turn, ahead);
                    } else {
                        pipeline.template next<kNumSums>(turn, ahead);
                    }
                    turn.x += size;
                    turn.weights += size * kPanelWidth;
                    turn.numbers += sizeof(float);
                    turn.scales += kPanelWidth;
                    turn.offsets += kOfGroups == OfGroups::kSums ? kPanelWidth : 0;
                }
                if (is_half) {
                    pipeline.template finish<kNumSums / 2>();
                }
            }
            sums += block_sums;
        }
        pipeline.template finish<kNumSums>();
    }

    // As a tile has them: four inputs of each output, then the next four.
    static void unpack(const W *values, int depth, std::int8_t *target, WeightsAhead<W> &ahead) {
        constexpr int kVectorInputs = 64 / static_cast<int>(kInputSize<W>);
        const auto *bytes = reinterpret_cast<const std::int8_t *>(values);
        for (int input = 0; input < depth; input += kVectorInputs) {
            if (input % amx::kTileBytes == 0) {
                ahead.step();
                amx::stay_awake();
            }
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

    static constexpr std::array<std::int32_t, kPanelWidth> filled(std::int32_t value) {
        std::array<std::int32_t, kPanelWidth> result;
        result.fill(value);
        return result;
    }

    alignas(64) static constexpr std::array<std::int32_t, kPanelWidth> kStart =
        filled(TileInputs::kStart);

    PanelLayout<W> layout_;
    int step_inputs_;
};

}  // namespace loraplex
