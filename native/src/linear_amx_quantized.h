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

    // x: a row of a piece
    static float number_of_group(const std::int8_t *x, int group) {
        return loraplex::number_of_group<W>(reinterpret_cast<const std::int16_t *>(x), group);
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
public:
    static constexpr int kNumBytes = 1;
    static constexpr std::int64_t kRowBytes = GroupInputs<W, std::int8_t>::kStride;
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
        return GroupInputs<W, std::int8_t>::num_bytes(num_rows, pieces) +
               2 * amx::kTileRows * kRowBytes;
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

    // What is multiplied at once: a group of two row tiles, or of the last one.
    struct Turn {
        const std::int8_t *x;
        const std::int8_t *weights;
        int depth;
        // To add the products:
        const std::int8_t *row;  // of the piece
        int group;               // of the piece
        const float *scales;     // of the first panel
        const float *offsets;
        float *sums;
    };

    // While tiles multiply a turn, the products of the last one go to memory, and those of the one before
    // are added: in small parts, as the CPU looks ahead for a few hundred instructions only.
    template <OfGroups kOfGroups>
    class Pipeline {
    public:
        explicit Pipeline(const AmxQuantizedProducts &owner)
            : step_inputs_(owner.step_inputs_),
              scales_stride_(owner.layout_.stride() / static_cast<std::int64_t>(sizeof(float))) {}

        // What the next call of next() takes.
        Turn &turn() { return turns_[index_]; }

        // kTiles: of sums. All turns up to finish() have as many.
        template <int kTiles>
        void next(WeightsAhead<W> &ahead) {
            const Turn &turn = turns_[index_];
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
            index_ = (index_ + 1) & 3;
        }

        template <int kTiles>
        void finish() {
            if (num_turns_ == 2) {
                add<kTiles>();
            }
            if (num_turns_ >= 1) {
                store_made<kTiles>();
                index_ = (index_ + 1) & 3;
                add<kTiles>();
            }
            num_turns_ = 0;
        }

    private:
        class Adder;

        // Of the last turn, and of the one before it.
        std::int32_t *products(int turn) {
            return memory_ + ((index_ ^ turn) & 1) * kNumSums * kProducts;
        }

        // kUnits: so many are added after a multiplication of tiles.
        template <int kTiles, int kUnits>
        void multiply(const Turn &turn, WeightsAhead<W> &ahead) {
            const Adder adder(turns_[(index_ - 2) & 3], products(1), scales_stride_);
            std::int32_t *const target = products(0);
            load_step<kTiles>(turn, 0);
            multiply_first<kTiles, kUnits>(adder, target, ahead);
            if constexpr (kUnits == 1) {
                load_step<kTiles>(turn, step_inputs_);
                multiply_second<kTiles>(adder, ahead);
                multiply_rest<kTiles>(turn, 2 * step_inputs_, ahead);
            }
        }

        template <int kTiles, int kUnits, int kTile = 0>
        __attribute__((always_inline)) static void multiply_first(const Adder &adder,
                                                                  std::int32_t *target,
                                                                  WeightsAhead<W> &ahead) {
            if constexpr (kTile < kTiles) {
                store<kTile>(target);
                start<kTile>();
                multiply_tile<kTile>();
                ahead.step();
                adder.template add<kTile * kUnits, kUnits>();
                multiply_first<kTiles, kUnits, kTile + 1>(adder, target, ahead);
            }
        }

        template <int kTiles, int kTile = 0>
        __attribute__((always_inline)) static void multiply_second(const Adder &adder,
                                                                   WeightsAhead<W> &ahead) {
            if constexpr (kTile < kTiles) {
                multiply_tile<kTile>();
                ahead.step();
                adder.template add<kTiles + kTile, 1>();
                multiply_second<kTiles, kTile + 1>(adder, ahead);
            }
        }

        template <int kTiles>
        void multiply_rest(const Turn &turn, int input, WeightsAhead<W> &ahead) {
            if (input == 0) {
                unrolled<kTiles>([]<int kTile>() { start<kTile>(); });
            }
            for (; input < turn.depth; input += step_inputs_) {
                load_step<kTiles>(turn, input);
                unrolled<kTiles>([&]<int kTile>() {
                    multiply_tile<kTile>();
                    ahead.step();
                });
            }
        }

        template <int kTiles>
        __attribute__((always_inline)) static void load_step(const Turn &turn, int input) {
            constexpr std::int64_t kRowBytes = TileInputs::kRowBytes;
            constexpr std::int64_t kSecond = TileInputs::kNumBytes == 2
                                                 ? std::int64_t{kMaxDepth<W>}
                                                 : amx::kTileRows * kRowBytes;
            const std::int8_t *values = turn.weights + input * kPanelWidth;
            amx::load<4>(turn.x + input, kRowBytes);
            amx::load<6>(values, amx::kTileBytes);
            amx::load<7>(values + kMaxDepth<W> * kPanelWidth, amx::kTileBytes);
            if constexpr (kTiles == kNumSums) {
                amx::load<5>(turn.x + input + kSecond, kRowBytes);
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
            std::int32_t *const target = products(0);
            unrolled<kTiles>([target]<int kTile>() { store<kTile>(target); });
        }

        template <int kTiles>
        void add() {
            Adder(turns_[(index_ - 2) & 3], products(1), scales_stride_)
                .template add<0, 2 * kTiles>();
        }

        // Adds the products of a turn. Without loops over what it holds, so that it stays in registers.
        class Adder {
        public:
            __attribute__((always_inline)) Adder(const Turn &turn, const std::int32_t *products,
                                                 std::int64_t stride)
                : products_(products), row_(turn.row), group_(turn.group), sums_(turn.sums),
                  first_scales_(load(turn.scales)), second_scales_(load(turn.scales + stride)) {
                if constexpr (kOfGroups == OfGroups::kSums) {
                    first_offsets_ = load(turn.offsets);
                    second_offsets_ = load(turn.offsets + stride);
                }
            }

            // Units from kFirst on, of 2 * kTiles in all.
            template <int kFirst, int kUnits>
            __attribute__((always_inline)) void add() const {
                constexpr int kUnitRows = kMaxRows / (2 * kNumSums);
                add_rows<kFirst * kUnitRows, kUnits * kUnitRows>();
            }

        private:
            template <int kRow, int kRows>
            __attribute__((always_inline)) void add_rows() const {
                const Floats number = kOfGroups == OfGroups::kNothing
                                          ? zeros()
                                          : broadcast(TileInputs::number_of_group(
                                                row_ + kRow * TileInputs::kRowBytes, group_));
                add_panel<kRow, 0>(number, first_scales_, first_offsets_);
                add_panel<kRow, 1>(number, second_scales_, second_offsets_);
                if constexpr (kRows > 1) {
                    add_rows<kRow + 1, kRows - 1>();
                }
            }

            template <int kRow, int kPanel>
            __attribute__((always_inline)) void add_panel(Floats number, Floats scales,
                                                          Floats offsets) const {
                Floats share = loraplex::multiply(
                    TileInputs::sum(products_ + kPanel * 2 * kProducts + kRow * kPanelWidth,
                                    kProducts),
                    scales);
                if constexpr (kOfGroups == OfGroups::kScales) {
                    share = loraplex::multiply(share, number);
                } else if constexpr (kOfGroups == OfGroups::kSums) {
                    share = subtract(share, loraplex::multiply(number, offsets));
                }
                float *target = sums_ + (kRow * kPanels + kPanel) * kPanelWidth;
                loraplex::store(target, loraplex::add(load(target), share));
            }

            const std::int32_t *products_;
            const std::int8_t *row_;
            int group_;
            float *sums_;
            Floats first_scales_, second_scales_;
            Floats first_offsets_ = zeros(), second_offsets_ = zeros();
        };

        const int step_inputs_;
        const std::int64_t scales_stride_;
        // The next one; the last one, the products of which are in the registers; the one before, the
        // products of which are in memory.
        Turn turns_[4];
        int index_ = 0;
        int num_turns_ = 0;
        alignas(64) std::int32_t memory_[2 * kNumSums * kProducts];
    };

    template <OfGroups kOfGroups>
    void add_blocks(const TileInputs &inputs, Range rows, TilePanels<W> panels,
                    const InputPiece &piece, const InputPiece &next, float *sums) const {
        const auto size = static_cast<int>(layout_.group_size());
        const auto num_groups = static_cast<int>(divide_up(piece.depth, size));
        const auto num_steps = static_cast<int>(divide_up(piece.depth, step_inputs_) *
                                                divide_up(rows.size, amx::kTileRows) * kPanels *
                                                TileInputs::kNumBytes);
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
                       piece.depth, weights[i]);
            }
            for (std::int64_t first = 0; first < rows.size; first += kMaxRows) {
                const auto *x =
                    reinterpret_cast<const std::int8_t *>(inputs.at(piece, rows.first + first));
                const bool is_half =
                    TileInputs::kNumBytes == 1 && rows.size - first <= amx::kTileRows;
                if (is_half) {
                    pipeline.template finish<kNumSums>();
                }
                for (int group = 0; group < num_groups; ++group) {
                    const int input = group * size;
                    const std::int64_t in_block = piece.first + input;
                    Turn &turn = pipeline.turn();
                    turn.x = x + input;
                    turn.weights = weights[0] + input * kPanelWidth;
                    turn.depth = std::min(size, piece.depth - input);
                    turn.row = x;
                    turn.group = group;
                    turn.scales = layout_.scales(panel, piece.block, in_block);
                    turn.offsets = layout_.offsets(panel, piece.block, in_block);
                    turn.sums = sums + first * kPanels * kPanelWidth;
                    if (is_half) {
                        pipeline.template next<kNumSums / 2>(ahead);
                    } else {
                        pipeline.template next<kNumSums>(ahead);
                    }
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
