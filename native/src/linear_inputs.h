// The inputs of `linear` as its inner loops read them: float32, bfloat16, or int16 and a scale for each
// row and block.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear_block.h"
#include "loraplex/simd.h"
#include "tiles.h"

namespace loraplex {

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
          group_size_(layout.group_size()), has_offsets_(layout.has_offsets()) {}

    std::int64_t size() const { return num_blocks_ * per_block_; }
    std::int64_t num_blocks() const { return num_blocks_; }
    std::int64_t block_inputs() const { return block_inputs_; }

    std::int64_t group_size() const { return group_size_; }

    // Whether the weight has offsets, which the sum of a group's inputs is multiplied by.
    bool has_offsets() const { return has_offsets_; }

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
    std::int64_t group_size_;
    bool has_offsets_;
};

// What x / scale rounded has at most `largest` as its magnitude, for the largest magnitude of some x.
// Tiny numbers count as zeros; if one of them is an infinity or a NaN, so is the scale a NaN.
struct Rounding {
    float scale;
    float factor;  // 1 / scale

    Rounding(float magnitude, float largest) {
        const bool is_finite = magnitude <= std::numeric_limits<float>::max();
        const bool is_zero = magnitude < 0x1p-100f;
        scale = !is_finite ? std::numeric_limits<float>::quiet_NaN()
                : is_zero  ? 0.0f
                           : magnitude / largest;
        factor = is_finite && !is_zero ? largest / magnitude : 0.0f;
    }
};

template <typename T>
inline void widen_inputs(const T *source, int count, float *target) {
    int input = 0;
    for (; input + kLanes <= count; input += kLanes) {
        store(target + input, load(source + input));
    }
    for (; input < count; ++input) {
        target[input] = widen(source[input]);
    }
}

inline constexpr int kPartInputs = 64;

// body(first, count) for parts of kPartInputs, a size that is known when it is compiled, and the rest.
template <typename Body>
__attribute__((always_inline)) inline void for_each_part(std::int64_t num_inputs,
                                                         const Body &body) {
    std::int64_t first = 0;
    for (; first + kPartInputs <= num_inputs; first += kPartInputs) {
        body(first, kPartInputs);
    }
    if (first < num_inputs) {
        body(first, static_cast<int>(num_inputs - first));
    }
}

// Infinite or NaN if one of the elements is; both have larger bits than every number.
template <typename T>
inline float largest_magnitude(const T *x, std::int64_t num_inputs) {
    std::uint32_t largest = 0;
    for_each_part(num_inputs, [&](std::int64_t first, int count) __attribute__((always_inline)) {
        float values[kPartInputs];
        widen_inputs(x + first, count, values);
        std::uint32_t bits[kPartInputs];
        std::memcpy(bits, values, sizeof(bits));
        for (int i = 0; i < count; ++i) {
            largest = std::max(largest, bits[i] & 0x7fffffffu);
        }
    });
    return std::bit_cast<float>(largest);
}

// target = round(source * factor)
template <typename T, typename X>
inline void round_inputs(const T *source, int depth, float factor, X *target) {
    const Floats factors = broadcast(factor);
    for_each_part(depth, [&](std::int64_t first, int count) __attribute__((always_inline)) {
        float values[kPartInputs + kLanes] = {};
        widen_inputs(source + first, count, values);
        for (int i = 0; i < count; i += kLanes) {
            store(values + i, round_to_integer(multiply(load(values + i), factors)));
        }
        for (int i = 0; i < count; ++i) {
            target[first + i] = static_cast<X>(static_cast<std::int32_t>(values[i]));
        }
    });
}

// [piece][row][kRowStride]; for quantised weights, then one float32 for each row and block.
// A row of a piece is its inputs, then the sums of its groups at kMaxDepth, where the weight has
// offsets.
template <typename W>
class Inputs {
public:
    static constexpr int kDepth = kMaxDepth<W>;
    // Whether a row's sums of a block are to be multiplied by scale().
    static constexpr bool kScalesBlocks = kIsQuantized<W>;

    static OfGroups of_groups(const PanelLayout<W> &layout) {
        return layout.has_offsets() ? OfGroups::kSums : OfGroups::kNothing;
    }

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
                    widen_inputs(from, depth, target);
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
    void quantize_block(std::int64_t row, std::int64_t block, const T *x) {
        const Rounding rounding(largest_magnitude(x, pieces_.block_inputs()),
                                std::numeric_limits<std::int16_t>::max());
        scales_[row * pieces_.num_blocks() + block] = rounding.scale;
        for_each_piece(row, block, x, [&](const T *source, int depth, std::int16_t *target) {
            round_inputs(source, depth, rounding.factor, target);
            if (pieces_.has_offsets()) {
                sum_groups(target, depth, static_cast<int>(pieces_.group_size()),
                           target + kMaxDepth<W>);
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
    static constexpr bool kScalesBlocks = false;

    static OfGroups of_groups(const PanelLayout<Bfloat16> &) { return OfGroups::kNothing; }

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
