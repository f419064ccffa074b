// The step of every product: few rows of inputs meet few vectors, their sums in registers.
#pragma once

namespace loraplex {

// sums[row][vector] = multiply_add(input(row), weight(vector), sums[row][vector])
template <int kRows, int kVectors, typename Sum, typename GetInput, typename GetWeight,
          typename MultiplyAdd>
__attribute__((always_inline)) inline void outer_product(Sum (&sums)[kRows][kVectors],
                                                         const GetInput &input,
                                                         const GetWeight &weight,
                                                         const MultiplyAdd &multiply_add) {
    if constexpr (kRows <= kVectors) {
        decltype(input(0)) inputs[kRows];
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            inputs[row] = input(row);
        }
#pragma GCC unroll 16
        for (int vector = 0; vector < kVectors; ++vector) {
            const auto factor = weight(vector);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                sums[row][vector] = multiply_add(inputs[row], factor, sums[row][vector]);
            }
        }
    } else {
        decltype(weight(0)) weights[kVectors];
#pragma GCC unroll 16
        for (int vector = 0; vector < kVectors; ++vector) {
            weights[vector] = weight(vector);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            const auto factor = input(row);
#pragma GCC unroll 16
            for (int vector = 0; vector < kVectors; ++vector) {
                sums[row][vector] = multiply_add(factor, weights[vector], sums[row][vector]);
            }
        }
    }
}

}  // namespace loraplex
