// The inputs of `linear` as its inner loops read them: float32, or int16 and a scale for each row.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear_block.h"
#include "loraplex/simd.h"

namespace loraplex {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Inputs that one call of an inner loop takes: of a block, and a maximum number.
struct InputPiece {
    std::int64_t index;  // of all
    std::int64_t block;
    std::int64_t first;  // in the block
    int depth;
};

template <typename W>
class InputPieces {
public:
    InputPieces(const PanelLayout<W> &layout, std::int64_t max_depth)
        : num_blocks_(layout.num_blocks()), block_inputs_(layout.block_inputs()),
          max_depth_(max_depth), per_block_(divide_up(block_inputs_, max_depth)),
          summed_inputs_(layout.has_offsets() ? layout.group_size() : 0) {}

    std::int64_t size() const { return num_blocks_ * per_block_; }
    std::int64_t num_blocks() const { return num_blocks_; }
    std::int64_t block_inputs() const { return block_inputs_; }

    // Inputs of a group, whose sum the weight's offsets are multiplied by; 0 if it has none.
    std::int64_t summed_inputs() const { return summed_inputs_; }

    InputPiece start(std::int64_t block) const { return piece(block * per_block_, block, 0); }

    // After the last one comes the start of a block that is none.
    InputPiece after(const InputPiece &last) const {
        const std::int64_t first = last.first + max_depth_;
        return first < block_inputs_ ? piece(last.index + 1, last.block, first)
                                     : start(last.block + 1);
    }

private:
    InputPiece piece(std::int64_t index, std::int64_t block, std::int64_t first) const {
        const auto depth = std::min(max_depth_, block_inputs_ - first);
        return {index, block, first, static_cast<int>(depth)};
    }

    std::int64_t num_blocks_;
    std::int64_t block_inputs_;
    std::int64_t max_depth_;
    std::int64_t per_block_;
    std::int64_t summed_inputs_;
};

// [piece][row][kRowStride]; for quantised weights, then one float32 for each row and block.
// A row of a piece is its inputs, then the sums of its groups at kMaxDepth, where the weight has
// offsets.
template <typename W>
class Inputs {
public:
    static constexpr int kDepth = kMaxDepth<W>;

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        const std::int64_t num_scales = kIsQuantized<W> ? num_rows * pieces.num_blocks() : 0;
        return values_size(num_rows, pieces) * sizeof(Input<W>) +
               static_cast<std::size_t>(num_scales) * sizeof(float);
    }

    // memory: num_bytes of it
    Inputs(void *memory, std::int64_t num_rows, const InputPieces<W> &pieces)
        : values_(static_cast<Input<W> *>(memory)), num_rows_(num_rows), pieces_(pieces),
          scales_(reinterpret_cast<float *>(values_ + values_size(num_rows, pieces))) {}

    const Input<W> *at(const InputPiece &piece, std::int64_t row) const {
        return values_ + (piece.index * num_rows_ + row) * kRowStride<W>;
    }

    // What the row's sums of a block are to be multiplied by; only for quantised weights.
    float scale(std::int64_t row, std::int64_t block) const {
        return scales_[row * pieces_.num_blocks() + block];
    }

    template <typename T>
    void set_row(std::int64_t row, const T *x) {
        for (std::int64_t block = 0; block < pieces_.num_blocks(); ++block) {
            const T *source = x + block * pieces_.block_inputs();
            if constexpr (kIsQuantized<W>) {
                quantize_block(row, block, source);
            } else {
                for_each_piece(row, block, source, [](const T *from, int depth, float *target) {
                    widen(from, depth, target);
                });
            }
        }
    }

private:
    static std::size_t values_size(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return static_cast<std::size_t>(pieces.size() * num_rows) * kRowStride<W>;
    }

    // body(source, depth, target) for the pieces of a block, which begins at x
    template <typename T, typename Body>
    void for_each_piece(std::int64_t row, std::int64_t block, const T *x, const Body &body) {
        for (InputPiece piece = pieces_.start(block); piece.block == block;
             piece = pieces_.after(piece)) {
            body(x + piece.first, piece.depth, const_cast<Input<W> *>(at(piece, row)));
        }
    }

    template <typename T>
    static void widen(const T *source, int depth, float *target) {
        int input = 0;
        for (; input + kLanes <= depth; input += kLanes) {
            store(target + input, load(source + input));
        }
        for (; input < depth; ++input) {
            target[input] = loraplex::widen(source[input]);
        }
    }

    template <typename T>
    void quantize_block(std::int64_t row, std::int64_t block, const T *x) {
        constexpr float kLargest = std::numeric_limits<std::int16_t>::max();
        const float magnitude = largest_magnitude(x);
        const bool is_finite = magnitude <= std::numeric_limits<float>::max();
        const bool is_zero = magnitude < 0x1p-100f;
        scales_[row * pieces_.num_blocks() + block] =
            !is_finite ? std::numeric_limits<float>::quiet_NaN()
            : is_zero  ? 0.0f
                       : magnitude / kLargest;
        const float factor = is_finite && !is_zero ? kLargest / magnitude : 0.0f;
        const auto summed = static_cast<int>(pieces_.summed_inputs());
        for_each_piece(row, block, x, [=](const T *source, int depth, std::int16_t *target) {
            quantize(source, depth, factor, target);
            if (summed > 0) {
                sum_groups(target, depth, summed, target + kMaxDepth<W>);
            }
        });
    }

    // sums: of neighbouring group_size inputs each, as float32. They are whole and exact.
    static void sum_groups(const std::int16_t *inputs, int depth, int group_size,
                           std::int16_t *sums) {
        for (int first = 0; first < depth; first += group_size) {
            std::int32_t total = 0;
            for (int i = first; i < std::min(depth, first + group_size); ++i) {
                total += inputs[i];
            }
            const auto sum = static_cast<float>(total);
            std::memcpy(sums, &sum, sizeof(sum));
            sums += sizeof(sum) / sizeof(*sums);
        }
    }

    // Infinite or NaN if one of the elements is; both have larger bits than every number.
    template <typename T>
    float largest_magnitude(const T *x) const {
        float values[kAtOnce];
        std::uint32_t largest = 0;
        const std::int64_t num_inputs = pieces_.block_inputs();
        for (std::int64_t first = 0; first < num_inputs; first += kAtOnce) {
            const auto count =
                static_cast<int>(std::min<std::int64_t>(kAtOnce, num_inputs - first));
            widen(x + first, count, values);
            std::uint32_t bits[kAtOnce];
            std::memcpy(bits, values, sizeof(bits));
            for (int i = 0; i < count; ++i) {
                largest = std::max(largest, bits[i] & 0x7fffffffu);
            }
        }
        return std::bit_cast<float>(largest);
    }

    // target = round(source * factor). What follows an odd last one meets a weight of 0.
    template <typename T>
    static void quantize(const T *source, int depth, float factor, std::int16_t *target) {
        const Floats factors = broadcast(factor);
        for (int first = 0; first < depth; first += kAtOnce) {
            const int count = std::min(kAtOnce, depth - first);
            float values[kAtOnce + kLanes] = {};
            widen(source + first, count, values);
            for (int i = 0; i < count; i += kLanes) {
                store(values + i, round_to_integer(multiply(load(values + i), factors)));
            }
            for (int i = 0; i < count; ++i) {
                target[first + i] = static_cast<std::int16_t>(values[i]);
            }
        }
    }

    static constexpr int kAtOnce = 64;  // elements at a time

    Input<W> *values_;
    std::int64_t num_rows_;
    InputPieces<W> pieces_;
    float *scales_;
};

// bfloat16 as it is: [piece][row][kStride], each row with zeros up to a multiple of kMultiple.
template <int kMaxInputs>
class PairInputs {
public:
    static constexpr int kDepth = kMaxInputs;
    static constexpr int kMultiple = 32;
    // Not a power of two, so that rows fall into different cache sets.
    static constexpr std::int64_t kStride = kDepth + kMultiple;

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<Bfloat16> &pieces) {
        return static_cast<std::size_t>(pieces.size() * num_rows * kStride) * sizeof(Bfloat16);
    }

    PairInputs(void *memory, std::int64_t num_rows, const InputPieces<Bfloat16> &pieces)
        : values_(static_cast<Bfloat16 *>(memory)), num_rows_(num_rows), pieces_(pieces) {}

    const Bfloat16 *at(const InputPiece &piece, std::int64_t row) const {
        return values_ + (piece.index * num_rows_ + row) * kStride;
    }

    void set_row(std::int64_t row, const Bfloat16 *x) {
        for (InputPiece piece = pieces_.start(0); piece.block < pieces_.num_blocks();
             piece = pieces_.after(piece)) {
            const Bfloat16 *source = x + piece.block * pieces_.block_inputs() + piece.first;
            auto *target = const_cast<Bfloat16 *>(at(piece, row));
            std::copy_n(source, piece.depth, target);
            std::fill_n(target + piece.depth, -piece.depth & (kMultiple - 1), Bfloat16{});
        }
    }

private:
    Bfloat16 *values_;
    std::int64_t num_rows_;
    InputPieces<Bfloat16> pieces_;
};

}  // namespace loraplex
