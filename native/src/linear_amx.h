// Products by the tile registers of AMX: bfloat16 inputs and weights, and quantised weights without a
// table.
//
// Tiles are always full: rows that a product lacks are whatever the memory holds, and their sums are
// not read. So a row's bits do not depend on the others.
//
// bfloat16: the order of addition is that of the instruction (amx.h), 32 inputs after 32. It differs
// from that of vectors, so where a CPU has AMX, all such products are made in it: those of few rows
// by vectors, because a tile costs the same with one row as with 16.
//
// Quantised: an input of 16 bits is 256 times a signed byte, plus an unsigned one. The sums of a group
// are integers and exact, so the bits are those of vectors.
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

// Inputs of quantised weights, of which a row of a piece is all high bytes, then all low bytes, both
// in the order in which `AmxProducts` unpacks weights, with zeros up to kMaxDepth.
template <typename W>
class ByteInputs : public Inputs<W> {
public:
    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return Inputs<W>::num_bytes(num_rows, pieces) +
               amx::kTileRows * kRowStride<W> * sizeof(Input<W>);
    }

    ByteInputs(void *memory, std::int64_t num_rows, const InputPieces<W> &pieces)
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

// body.operator()<i>() for i from 0 to kCount - 1
template <int kCount, typename Body>
__attribute__((always_inline)) inline void unrolled(const Body &body) {
    [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
        (body.template operator()<kIndices>(), ...);
    }(std::make_integer_sequence<int, kCount>());
}

// Fewer rows of quantised weights are faster by vectors.
inline constexpr std::int64_t kFewestByteRows = 16;

// Of the registers, the first ones are for sums.
inline constexpr int kNumSums = 4;

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
        return {block_shape(std::min(num_rows, kMaxRows)), 1, kMaxRows};
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
template <typename W>
class AmxProducts;

template <>
class AmxProducts<Bfloat16> {
public:
    using Weight = Bfloat16;
    template <typename T>
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

template <typename W>
    requires(std::is_same_v<W, Int8> || std::is_same_v<W, Int4>)
class AmxProducts<W> {
public:
    using Weight = W;
    template <typename T>
    using RowInputs = ByteInputs<W>;

    static Cut cut(std::int64_t /*num_rows*/) {
        return {{amx::kTileRows, kPanels}, kTilePanels / kPanels, kMaxAmxRows};
    }

    AmxProducts(const PanelLayout<W> &layout, std::uint64_t /*cpu_features*/)
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
    void add(const ByteInputs<W> &inputs, BlockShape /*shape*/, Range rows, TilePanels<W> panels,
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

    // A group of the inputs of a piece.
    struct Group {
        const std::int16_t *x;
        int number;
        const W *panel;
        const InputPiece &piece;
    };

    int group_size() const { return static_cast<int>(layout_.group_size()); }

    void add_block(const ByteInputs<W> &inputs, Range rows, const W *panel, const InputPiece &piece,
                   WeightsAhead<W> &ahead, float *sums) const {
        alignas(64) std::int8_t weights[kPanels][kMaxDepth<W> * kPanelWidth];
        for (int i = 0; i < kPanels; ++i) {
            unpack(layout_.values(panel + i * layout_.stride(), piece.block, piece.first),
                   piece.depth, weights[i]);
        }
        for (std::int64_t first = 0; first < rows.size; first += amx::kTileRows) {
            const auto *x = inputs.at(piece, rows.first + first);
            const auto count = static_cast<int>(
                std::min<std::int64_t>(amx::kTileRows, rows.size - first));
            for (int input = 0; input < piece.depth; input += group_size()) {
                multiply(reinterpret_cast<const std::int8_t *>(x) + input,
                         weights[0] + input * kPanelWidth,
                         std::min(group_size(), piece.depth - input), ahead);
                const Group group = {x, input / group_size(), panel, piece};
                float *target = sums + first * kPanels * kPanelWidth;
                if (layout_.has_offsets()) {
                    add_group<true>(group, count, target);
                } else {
                    add_group<false>(group, count, target);
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

    // Sums 0 and 1 of the high bytes, 2 and 3 of the low ones, of each panel.
    void multiply(const std::int8_t *x, const std::int8_t *weights, int depth,
                  WeightsAhead<W> &ahead) const {
        constexpr std::int64_t kRowBytes = kRowStride<W> * sizeof(Input<W>);
        unrolled<kNumSums>([]<int kTile>() { amx::zero<kTile>(); });
        for (int input = 0; input < depth; input += step_inputs_) {
            const std::int8_t *values = weights + input * kPanelWidth;
            ahead.step();
            amx::load<4>(x + input, kRowBytes);
            amx::load<5>(x + input + kMaxDepth<W>, kRowBytes);
            amx::load<6>(values, amx::kTileBytes);
            amx::load<7>(values + kMaxDepth<W> * kPanelWidth, amx::kTileBytes);
            amx::multiply_signed<0, 4, 6>();
            amx::multiply_signed<1, 4, 7>();
            amx::multiply_unsigned<2, 5, 6>();
            amx::multiply_unsigned<3, 5, 7>();
        }
    }

    template <bool kHasOffsets>
    void add_group(const Group &group, int num_rows, float *sums) const {
        alignas(64) std::int32_t products[kNumSums][amx::kTileRows][kPanelWidth];
        unrolled<kNumSums>(
            [&]<int kTile>() { amx::store<kTile>(products[kTile], amx::kTileBytes); });
        const bool is_first = group.piece.first == 0 && group.number == 0;
        for (int panel = 0; panel < kPanels; ++panel) {
            const W *weights = group.panel + panel * layout_.stride();
            const std::int64_t input = group.piece.first + group.number * layout_.group_size();
            const Floats scale = load(layout_.scales(weights, group.piece.block, input));
            const Floats offset =
                kHasOffsets ? load(layout_.offsets(weights, group.piece.block, input)) : zeros();
            for (int row = 0; row < num_rows; ++row) {
                const __m512i high = _mm512_load_si512(products[panel][row]);
                const __m512i low = _mm512_load_si512(products[kPanels + panel][row]);
                const Ints sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
                float *target = sums + (row * kPanels + panel) * kPanelWidth;
                Floats share = loraplex::multiply(to_floats(sum), scale);
                if constexpr (kHasOffsets) {
                    const float inputs =
                        sum_of_inputs<W>(group.x + row * kRowStride<W>, group.number);
                    share = subtract(share, loraplex::multiply(broadcast(inputs), offset));
                }
                store(target, loraplex::add(is_first ? zeros() : load(target), share));
            }
        }
    }

    PanelLayout<W> layout_;
    int step_inputs_;
};

}  // namespace loraplex
