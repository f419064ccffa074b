// simd.h for x86-64-v4: AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "loraplex/dtype.h"

namespace loraplex {

using Floats = __m512;
inline constexpr int kLanes = 16;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats broadcast(float value) { return _mm512_set1_ps(value); }

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }

// a * b + c, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// To the nearest integer, ties to even.
inline Floats round_to_integer(Floats a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Lanes 2 i and 2 i + 1 in each other's place.
inline Floats swap_neighbours(Floats a) { return _mm512_permute_ps(a, 0xb1); }

// 2^n for whole n in [-126, 127].
inline Floats power_of_two(Floats n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

inline Floats load(const float *source) { return _mm512_loadu_ps(source); }

inline Floats load(const Bfloat16 *source) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline Floats load(const Float16 *source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(source)));
}

inline Floats load(const std::int8_t *source) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(source));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Of kLanes pairs (a0, b0, a1, b1, ...): the a's, and the b's.
inline Floats load_firsts(const Bfloat16 *pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}

inline Floats load_seconds(const Bfloat16 *pairs) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), high));
}

inline void store(float *target, Floats value) { _mm512_storeu_ps(target, value); }

inline void store(Bfloat16 *target, Floats value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i halves = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(target), _mm512_cvtepi32_epi16(halves));
}

inline void store(Float16 *target, Floats value) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i *>(target),
        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// kLanes sums of int32.
using Ints = __m512i;
// kLanes pairs of int16.
using Pairs = __m512i;

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints broadcast(std::int32_t value) { return _mm512_set1_epi32(value); }

inline Ints load_ints(const std::int8_t *source) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(source)));
}

inline Pairs broadcast_pair(const std::int16_t *pair) {
    std::int32_t bits;
    std::memcpy(&bits, pair, sizeof(bits));
    return _mm512_set1_epi32(bits);
}

inline Pairs load_pairs(const std::int8_t *pairs) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(pairs)));
}

// Of kLanes pairs of 16-bit words: the signed nibbles at bit 4 * kNibble.
template <int kNibble>
inline Pairs load_nibbles(const std::uint8_t *words) {
    const __m512i bits = _mm512_loadu_si512(words);
    const __m512i top = kNibble == 3 ? bits : _mm512_slli_epi16(bits, 12 - 4 * kNibble);
    return _mm512_srai_epi16(top, 12);
}

// 16 int16 by number, twice: the fifth bit of a number makes no difference.
struct TableEntries {
    __m512i entries;

    // table: their low bytes, then their high bytes
    explicit TableEntries(const std::uint8_t *table) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table + 16));
        const __m256i once = _mm256_set_m128i(_mm_unpackhi_epi8(low, high),
                                              _mm_unpacklo_epi8(low, high));
        entries = _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
    }
};

// Of a panel's four inputs, as Table4 has them: the entries of pair kPair of the outputs of one of
// its vectors, of which there is one.
template <int kPair>
inline Pairs load_entries(const std::uint8_t *fours, int, const TableEntries &table) {
    const __m512i words = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i *>(fours)));
    // The outputs are 0..3, 8..11, 4..7, 12..15.
    const __m512i ordered = _mm512_shuffle_i32x4(words, words, 0xd8);
    return _mm512_permutexvar_epi16(kPair == 0 ? ordered : _mm512_srli_epi16(ordered, 4),
                                    table.entries);
}

// sum + a0 * b0 + a1 * b1 of each pair; nothing overflows. In assembly: a compiler would do all
// multiplications of a step first, and has no registers for what they give.
inline Ints dot_add(Ints sum, Pairs a, Pairs b) {
    Ints product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(a), "v"(b));
    return sum;
}

// The same in one instruction of AVX512-VNNI. In assembly: the library must load without it.
struct VnniDot {
    Ints operator()(Ints sum, Pairs a, Pairs b) const {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
};

// kLanes fours of bytes.
using Fours = __m512i;

// The bits of `mask` of each byte, after a shift to the right, or to the left if kShift is below 0.
template <int kShift>
inline Fours load_bits(const std::uint8_t *fours, std::uint8_t mask) {
    const __m512i bytes = _mm512_loadu_si512(fours);
    const __m512i shifted = kShift >= 0 ? _mm512_srli_epi16(bytes, kShift < 0 ? 0 : kShift)
                                        : _mm512_slli_epi16(bytes, kShift < 0 ? -kShift : 0);
    return _mm512_and_si512(shifted, _mm512_set1_epi8(static_cast<char>(mask)));
}

inline Fours unite(Fours a, Fours b) { return _mm512_or_si512(a, b); }

// Four bytes of inputs in each lane. In assembly: a compiler would load those of all rows first, and
// has no registers for them.
__attribute__((always_inline)) inline Fours broadcast_fours(const std::int8_t *inputs) {
    Fours fours;
    asm("vpbroadcastd %1, %0" : "=v"(fours) : "m"(*reinterpret_cast<const FourBytes *>(inputs)));
    return fours;
}

// sum + the four products of each lane; weights are 0 .. 63, so that two products fit in 16 bits.
struct PlainFours {
    Ints operator()(Ints sum, Fours weights, Fours inputs) const {
        const __m512i pairs = _mm512_maddubs_epi16(weights, inputs);
        return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
};

// The same in one instruction of AVX512-VNNI. In assembly: the library must load without it.
struct VnniFours {
    __attribute__((always_inline)) Ints operator()(Ints sum, Fours weights, Fours inputs) const {
        asm("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(inputs), "v"(weights));
        return sum;
    }
};

}  // namespace loraplex
