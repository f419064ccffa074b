// Pairs of bfloat16, and AVX-512's own instruction for their products.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "loraplex/simd.h"

namespace loraplex {

using Bfloat16Pairs = Pairs;

__attribute__((always_inline)) inline Bfloat16Pairs broadcast_pair(const Bfloat16 *pair) {
    return broadcast_pair(reinterpret_cast<const std::int16_t *>(pair));
}

// The pair of one number and 0.
inline Bfloat16Pairs broadcast_single(Bfloat16 number) { return _mm512_set1_epi32(number.bits); }

// kLanes firsts and as many seconds, by pairs.
inline Bfloat16Pairs interleave(const Bfloat16 *firsts, const Bfloat16 *seconds) {
    const __m512i order = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const auto halves = [](const Bfloat16 *numbers) {
        return _mm512_castsi256_si512(
            _mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers)));
    };
    return _mm512_permutex2var_epi16(halves(firsts), order, halves(seconds));
}

// kLanes firsts, each with 0.
inline Bfloat16Pairs singles(const Bfloat16 *firsts) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(firsts)));
}

// sum + a1 * b1, then + a0 * b0. Subnormal numbers count as 0. In assembly, as below: the library
// must load without AVX512-BF16.
__attribute__((always_inline)) inline Floats add_products(Bfloat16Pairs a, Bfloat16Pairs b,
                                                          Floats sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

// To the nearest, ties to even, as store does, but subnormal numbers become 0.
inline void store_normal(Bfloat16 *target, Floats value) {
    __m256i rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(value));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(target), rounded);
}

}  // namespace loraplex
