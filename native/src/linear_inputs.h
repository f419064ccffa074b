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

// [depth block][row][kRowStride]; for quantised weights, then one float32 for each row.
template <typename W>
class Inputs {
public:
    static std::size_t num_bytes(std::int64_t num_rows, std::int64_t in_features) {
        return values_size(num_rows, in_features) * sizeof(Input<W>) +
               static_cast<std::size_t>(kIsQuantized<W> ? num_rows : 0) * sizeof(float);
    }

    Inputs() = default;

    // memory: num_bytes of it
    Inputs(void *memory, std::int64_t num_rows, std::int64_t in_features)
        : values_(static_cast<Input<W> *>(memory)), num_rows_(num_rows), in_features_(in_features),
          scales_(reinterpret_cast<float *>(values_ + values_size(num_rows, in_features))) {}

    const Input<W> *at(std::int64_t first_input, std::int64_t row) const {
        return values_ + (first_input / kMaxDepth<W> * num_rows_ + row) * kRowStride<W>;
    }

    // What the row's sums are to be multiplied by; only for quantised weights.
    float scale(std::int64_t row) const { return scales_[row]; }

    template <typename T>
    void set_row(std::int64_t row, const T *x) {
        if constexpr (kIsQuantized<W>) {
            quantize_row(row, x);
        } else {
            for_each_depth_block(row, x, [](const T *source, int depth, float *target) {
                widen(source, depth, target);
            });
        }
    }

private:
    static std::size_t values_size(std::int64_t num_rows, std::int64_t in_features) {
        return static_cast<std::size_t>(divide_up(in_features, kMaxDepth<W>) * num_rows) *
               kRowStride<W>;
    }

    // body(source, depth, target) for the inputs of each depth block
    template <typename T, typename Body>
    void for_each_depth_block(std::int64_t row, const T *x, const Body &body) {
        for (std::int64_t first = 0; first < in_features_; first += kMaxDepth<W>) {
            const std::int64_t depth = std::min<std::int64_t>(kMaxDepth<W>, in_features_ - first);
            body(x + first, static_cast<int>(depth), const_cast<Input<W> *>(at(first, row)));
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
    void quantize_row(std::int64_t row, const T *x) {
        constexpr float kLargest = std::numeric_limits<std::int16_t>::max();
        const float magnitude = largest_magnitude(x);
        const bool is_finite = magnitude <= std::numeric_limits<float>::max();
        const bool is_zero = magnitude < 0x1p-100f;
        scales_[row] = !is_finite ? std::numeric_limits<float>::quiet_NaN()
                       : is_zero  ? 0.0f
                                  : magnitude / kLargest;
        const float factor = is_finite && !is_zero ? kLargest / magnitude : 0.0f;
        for_each_depth_block(row, x, [factor](const T *source, int depth, std::int16_t *target) {
            quantize(source, depth, factor, target);
        });
    }

    // Infinite or NaN if one of the elements is; both have larger bits than every number.
    template <typename T>
    float largest_magnitude(const T *x) const {
        float values[kPiece];
        std::uint32_t largest = 0;
        for (std::int64_t first = 0; first < in_features_; first += kPiece) {
            const auto count = static_cast<int>(std::min<std::int64_t>(kPiece, in_features_ - first));
            widen(x + first, count, values);
            std::uint32_t bits[kPiece];
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
        for (int first = 0; first < depth; first += kPiece) {
            const int count = std::min(kPiece, depth - first);
            float values[kPiece + kLanes] = {};
            widen(source + first, count, values);
            for (int i = 0; i < count; i += kLanes) {
                store(values + i, round_to_integer(multiply(load(values + i), factors)));
            }
            for (int i = 0; i < count; ++i) {
                target[first + i] = static_cast<std::int16_t>(values[i]);
            }
        }
    }

    static constexpr int kPiece = 64;

    Input<W> *values_ = nullptr;
    std::int64_t num_rows_ = 0;
    std::int64_t in_features_ = 0;
    float *scales_ = nullptr;
};

}  // namespace loraplex
