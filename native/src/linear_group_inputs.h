// The inputs of `linear` in 8 bits, with a scale for each group of the weight's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "linear_inputs.h"

namespace loraplex {

// Bytes that products take at once: inputs of int8 have zeros up to a multiple of it.
inline constexpr int kByteMultiple = 64;

// Whether products of bytes take signed weights.
#if defined(LORAPLEX_ISA_NEON)
inline constexpr bool kHasSignedDots = true;
#else
inline constexpr bool kHasSignedDots = false;
#endif

// [piece][row][kStride]. X: int16 in their order, for products of pairs; or int8 in the order of
// `order_bytes`, for products of four. A row of a piece is its inputs, then at kMaxDepth a scale for
// each group, float32; of int8, then an int32 for each, which its sums of products lack.
template <typename W, typename X>
class GroupInputs {
public:
    static constexpr int kDepth = kMaxDepth<W>;
    static constexpr bool kScalesBlocks = false;

    static OfGroups of_groups(const PanelLayout<W> &) { return OfGroups::kScales; }

    static constexpr int kMaxGroups = kDepth / LORAPLEX_MIN_GROUP_SIZE;
    static constexpr bool kHasMissing = std::is_same_v<X, std::int8_t>;
    // What is added to weights, so that none is below 0 where products of bytes want that.
    static constexpr std::int32_t kZero = std::is_same_v<W, Int4> ? 8 : kHasSignedDots ? 0 : 128;
    // Not a power of two, so that rows fall into different cache sets.
    static constexpr std::int64_t kStride =
        kDepth + ((kHasMissing ? 2 : 1) * kMaxGroups * sizeof(float) + 64) / sizeof(X);

    static std::size_t num_bytes(std::int64_t num_rows, const InputPieces<W> &pieces) {
        return static_cast<std::size_t>(pieces.size() * num_rows * kStride) * sizeof(X);
    }

    // memory: num_bytes of it
    GroupInputs(void *memory, std::int64_t num_rows, const InputPieces<W> &pieces)
        : values_(static_cast<X *>(memory)), num_rows_(num_rows), pieces_(pieces) {}

    const X *at(const InputPiece &piece, std::int64_t row) const {
        return values_ + (piece.index * num_rows_ + row) * kStride;
    }

    // x: a row of a piece
    static float scale(const X *x, int group) { return number<float>(x, group); }

    static std::int32_t missing(const X *x, int group) {
        return number<std::int32_t>(x, kMaxGroups + group);
    }

    template <typename T>
    void set_row(std::int64_t row, const T *x) {
        for (InputPiece piece = pieces_.start(0); piece.block < pieces_.num_blocks();
             piece = pieces_.after(piece)) {
            set_piece(x + piece.block * pieces_.block_inputs() + piece.first, piece.depth,
                      const_cast<X *>(at(piece, row)));
        }
    }

private:
    static_assert(kHasMissing || kStride == kRowStride<W>);

    static constexpr float kLargest = std::numeric_limits<std::int8_t>::max();

    template <typename Number>
    static Number number(const X *x, int index) {
        Number result;
        std::memcpy(&result, place(x, index), sizeof(result));
        return result;
    }

    static const X *place(const X *x, int index) {
        return x + kDepth + index * static_cast<int>(sizeof(float) / sizeof(X));
    }

    template <typename Number>
    static void set_number(X *x, int index, Number value) {
        std::memcpy(const_cast<X *>(place(x, index)), &value, sizeof(value));
    }

    template <typename T>
    void set_piece(const T *source, int depth, X *target) const {
        const auto size = static_cast<int>(pieces_.group_size());
        for (int first = 0; first < depth; first += size) {
            const int count = std::min(size, depth - first);
            const Rounding rounding(largest_magnitude(source + first, count), kLargest);
            round_inputs(source + first, count, rounding.factor, target + first);
            set_number(target, first / size, rounding.scale);
            if constexpr (kHasMissing) {
                const std::int32_t sum =
                    std::accumulate(target + first, target + first + count, std::int32_t{0});
                set_number(target, kMaxGroups + first / size, -kZero * sum);
            }
        }
        if constexpr (kHasMissing) {
            std::fill_n(target + depth, -depth & (kByteMultiple - 1), X{});
            if constexpr (std::is_same_v<W, Int4>) {
                order_bytes(target, depth);
            }
        }
    }

    // Of Int4, the low four bits of a panel's bytes are inputs 0, 4, 1, 5 of eight, the high ones
    // 2, 6, 3, 7.
    static void order_bytes(X *inputs, int depth) {
        for (X *eight = inputs; eight < inputs + depth; eight += 8) {
            const X ordered[] = {eight[0], eight[4], eight[1], eight[5],
                                 eight[2], eight[6], eight[3], eight[7]};
            std::memcpy(eight, ordered, sizeof(ordered));
        }
    }

    X *values_;
    std::int64_t num_rows_;
    InputPieces<W> pieces_;
};

}  // namespace loraplex
