// Dot products of a few tokens with a few rows of A.
//
// Every product is one accumulator whose lanes are chains of multiply_add over rising elements,
// added by sum_lanes: the same for every number of tokens and rows.
#pragma once

#include <cstdint>

#include "block_product.h"
#include "loraplex/simd.h"

namespace loraplex {

inline constexpr std::int64_t kShrinkTokens = 4;
// kTokens * kRows accumulators, the rows' and one token's vector fit in 16 registers.
inline constexpr int kRowsOfOneToken = 8;
inline constexpr int kRowsOfTokens = 3;

template <int kTokens, int kRows, typename T>
inline void dot_block(const float *const *tokens, const T *const *rows, std::int64_t length,
                      Matrix<float> sums) {
    Floats lanes[kTokens][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            lanes[t][r] = zeros();
        }
    }
    std::int64_t i = 0;
    for (; i + kLanes <= length; i += kLanes) {
        Floats weights[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            weights[r] = load(rows[r] + i);
        }
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            const Floats input = load(tokens[t] + i);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                lanes[t][r] = multiply_add(input, weights[r], lanes[t][r]);
            }
        }
    }
    const int rest = static_cast<int>(length - i);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            if (rest > 0) {
                lanes[t][r] = multiply_add(load_first(tokens[t] + i, rest),
                                           load_first(rows[r] + i, rest), lanes[t][r]);
            }
            sums.row(t)[r] = sum_lanes(lanes[t][r]);
        }
    }
}

template <int kTokens, int kRows, typename T>
inline void dot_rows_of(const float *const *tokens, const T *const *rows, int num_rows,
                        std::int64_t length, Matrix<float> sums) {
    int done = 0;
    for (; num_rows - done >= kRows; done += kRows) {
        dot_block<kTokens, kRows>(tokens, rows + done, length, sums.at(0, done));
    }
    if constexpr (kRows > 1) {
        dot_rows_of<kTokens, kRows / 2>(tokens, rows + done, num_rows - done, length,
                                        sums.at(0, done));
    }
}

// sums[t][r] = tokens[t] . rows[r]; num_tokens is at most kShrinkTokens.
template <typename T>
inline void dot_rows(const float *const *tokens, int num_tokens, const T *const *rows,
                     int num_rows, std::int64_t length, Matrix<float> sums) {
    switch (num_tokens) {
        case 1: return dot_rows_of<1, kRowsOfOneToken>(tokens, rows, num_rows, length, sums);
        case 2: return dot_rows_of<2, kRowsOfTokens>(tokens, rows, num_rows, length, sums);
        case 3: return dot_rows_of<3, kRowsOfTokens>(tokens, rows, num_rows, length, sums);
        default: return dot_rows_of<4, kRowsOfTokens>(tokens, rows, num_rows, length, sums);
    }
}

}  // namespace loraplex
