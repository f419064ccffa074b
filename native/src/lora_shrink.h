// Dot products of a few tokens with a few rows of A.
//
// Every product is one accumulator whose lanes are chains of multiply_add over rising elements,
// added by sum_lanes: the same for every number of tokens and rows. Of blocks of elements each has
// a product, and neighbouring ones are added until one is left.
#pragma once

#include <cstdint>

#include "block_product.h"
#include "loraplex/simd.h"

namespace loraplex {

inline constexpr std::int64_t kShrinkTokens = 4;
inline constexpr std::int64_t kShrinkRows = 24;
// kTokens * kRows accumulators, the rows' and one token's vector fit in the registers.
inline constexpr int kRowsOfOneToken = 8;
#if defined(LORAPLEX_ISA_X86_64_V4) || defined(LORAPLEX_ISA_NEON)
inline constexpr int kRowsOfTokens = 6;  // of 32
#else
inline constexpr int kRowsOfTokens = 3;  // of 16
#endif

struct Elements {
    std::int64_t first;
    std::int64_t end;
};

template <int kTokens, int kRows, typename T>
inline void dot_block(const float *const *tokens, const T *const *rows, Elements elements,
                      Matrix<float> sums) {
    Floats lanes[kTokens][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            lanes[t][r] = zeros();
        }
    }
    std::int64_t i = elements.first;
    for (; i + kLanes <= elements.end; i += kLanes) {
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
    alignas(64) float totals[kTokens * kRows][kLanes];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            store(totals[t * kRows + r], lanes[t][r]);
        }
    }
    // What is done once for each product is not unrolled: it would be most of the code.
    const int rest = static_cast<int>(elements.end - i);
#pragma GCC unroll 1
    for (int j = 0; j < kTokens * kRows; ++j) {
        const int t = j / kRows, r = j % kRows;
        Floats total = load(totals[j]);
        if (rest > 0) {
            total = multiply_add(load_first(tokens[t] + i, rest), load_first(rows[r] + i, rest),
                                 total);
        }
        sums.row(t)[r] = sum_lanes(total);
    }
}

template <int kTokens, int kRows, typename T>
inline void dot_rows_of(const float *const *tokens, const T *const *rows, int num_rows,
                        Elements elements, Matrix<float> sums) {
    int done = 0;
    for (; num_rows - done >= kRows; done += kRows) {
        dot_block<kTokens, kRows>(tokens, rows + done, elements, sums.at(0, done));
    }
    if constexpr (kRows > 1) {
        dot_rows_of<kTokens, kRows / 2>(tokens, rows + done, num_rows - done, elements,
                                        sums.at(0, done));
    }
}

template <typename T>
inline void dot_rows(const float *const *tokens, int num_tokens, const T *const *rows,
                     int num_rows, Elements elements, Matrix<float> sums) {
    switch (num_tokens) {
        case 1: return dot_rows_of<1, kRowsOfOneToken>(tokens, rows, num_rows, elements, sums);
        case 2: return dot_rows_of<2, kRowsOfTokens>(tokens, rows, num_rows, elements, sums);
        case 3: return dot_rows_of<3, kRowsOfTokens>(tokens, rows, num_rows, elements, sums);
        default: return dot_rows_of<4, kRowsOfTokens>(tokens, rows, num_rows, elements, sums);
    }
}

// sums[t][r] = tokens[t] . rows[r] of the elements; of tokens kShrinkTokens at most, of rows
// kShrinkRows. num_blocks is a power of two that divides the number of elements.
template <typename T>
inline void dot_blocks(const float *const *tokens, int num_tokens, const T *const *rows,
                       int num_rows, Elements elements, std::int64_t num_blocks,
                       Matrix<float> sums) {
    if (num_blocks == 1) {
        dot_rows(tokens, num_tokens, rows, num_rows, elements, sums);
        return;
    }
    const std::int64_t middle = (elements.first + elements.end) / 2;
    float right[kShrinkTokens * kShrinkRows];
    dot_blocks(tokens, num_tokens, rows, num_rows, {elements.first, middle}, num_blocks / 2, sums);
    dot_blocks(tokens, num_tokens, rows, num_rows, {middle, elements.end}, num_blocks / 2,
               {right, kShrinkRows});
    for (int t = 0; t < num_tokens; ++t) {
        for (int r = 0; r < num_rows; ++r) {
            sums.row(t)[r] += right[t * kShrinkRows + r];
        }
    }
}

}  // namespace loraplex
