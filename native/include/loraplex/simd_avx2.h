// simd.h for x86-64-v3: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "loraplex/dtype.h"

namespace loraplex {

using Floats = __m256;
inline constexpr int kLanes = 8;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats broadcast(float value) { return _mm256_set1_ps(value); }

inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }

// a * b + c, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// To the nearest integer, ties to even.
inline Floats round_to_integer(Floats a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Lanes 2 i and 2 i + 1 in each other's place.
inline Floats swap_neighbours(Floats a) { return _mm256_permute_ps(a, 0xb1); }

// 2^n for whole n in [-126, 127].
inline Floats power_of_two(Floats n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

inline Floats load(const float *source) { return _mm256_loadu_ps(source); }

inline Floats load(const Bfloat16 *source) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline Floats load(const Float16 *source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(source)));
}

inline Floats load(const std::int8_t *source) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(source));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

// Of kLanes pairs (a0, b0, a1, b1, ...): the a's, and the b's.
inline Floats load_firsts(const Bfloat16 *pairs) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(pairs));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

alignas(32) inline constexpr std::uint32_t kHighHalves[kLanes] = {
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

// Where the sixteen registers are all taken by sums and their factors, a compiler would keep the
// mask or what load_firsts has read in one more, and push a sum out. So both come from memory here.
inline Floats load_seconds(const Bfloat16 *pairs) {
    struct Pairs {
        Bfloat16 elements[2 * kLanes];
    };
    Floats high;
    asm("vmovups %1, %0\n\tvandps %2, %0, %0"
        : "=x"(high)
        : "m"(*reinterpret_cast<const Pairs *>(pairs)), "m"(kHighHalves));
    return high;
}

inline void store(float *target, Floats value) { _mm256_storeu_ps(target, value); }

inline void store(Bfloat16 *target, Floats value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(rounded, quiet, is_nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(target), _mm256_castsi256_si128(packed));
}

inline void store(Float16 *target, Floats value) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(target),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// kLanes sums of int32.
using Ints = __m256i;
// kLanes pairs of int16.
using Pairs = __m256i;

inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Floats to_floats(Ints value) { return _mm256_cvtepi32_ps(value); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints broadcast(std::int32_t value) { return _mm256_set1_epi32(value); }

inline Ints load_ints(const std::int8_t *source) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(source)));
}

inline Pairs broadcast_pair(const std::int16_t *pair) {
    std::int32_t bits;
    std::memcpy(&bits, pair, sizeof(bits));
    return _mm256_set1_epi32(bits);
}

inline Pairs load_pairs(const std::int8_t *pairs) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(pairs)));
}

// Of kLanes pairs of 16-bit words: the signed nibbles at bit 4 * kNibble. In assembly, as
// load_seconds: a compiler would keep the words in a register.
template <int kNibble>
inline Pairs load_nibbles(const std::uint8_t *words) {
    struct Words {
        std::uint8_t bytes[4 * kLanes];
    };
    Pairs nibbles;
    asm("vmovdqu %1, %0\n\tvpsllw %2, %0, %0\n\tvpsraw $12, %0, %0"
        : "=x"(nibbles)
        : "m"(*reinterpret_cast<const Words *>(words)), "i"(12 - 4 * kNibble));
    return nibbles;
}

// 16 int16 by number: their low bytes, then their high bytes.
struct TableEntries {
    const std::uint8_t *bytes;

    explicit TableEntries(const std::uint8_t *table) : bytes(table) {}
};

alignas(32) inline constexpr std::uint32_t kLowNibbles[kLanes] = {
    0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu,
    0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu};

// Of a panel's four inputs, as Table4 has them: the entries of pair kPair of the outputs of one of
// its vectors. In assembly: a compiler would keep both halves of the table in registers.
template <int kPair>
inline Pairs load_entries(const std::uint8_t *fours, int vector, const TableEntries &table) {
    struct Fours {
        std::uint8_t bytes[32];
    };
    struct Half {
        std::uint8_t bytes[16];
    };
    __m256i numbers;
    const auto &bytes = *reinterpret_cast<const Fours *>(fours);
    if constexpr (kPair == 0) {
        asm("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=x"(numbers) : "m"(bytes), "m"(kLowNibbles));
    } else {
        asm("vmovdqu %1, %0\n\tvpsrlw $4, %0, %0\n\tvpand %2, %0, %0"
            : "=x"(numbers)
            : "m"(bytes), "m"(kLowNibbles));
    }
    const auto *halves = reinterpret_cast<const Half *>(table.bytes);
    __m256i low, high;
    asm("vbroadcasti128 %2, %0\n\tvpshufb %1, %0, %0" : "=&x"(low) : "x"(numbers), "m"(halves[0]));
    asm("vbroadcasti128 %2, %0\n\tvpshufb %1, %0, %0"
        : "=&x"(high)
        : "x"(numbers), "m"(halves[1]));
    return vector == 0 ? _mm256_unpacklo_epi8(low, high) : _mm256_unpackhi_epi8(low, high);
}

// sum + a0 * b0 + a1 * b1 of each pair; nothing overflows. In assembly: a compiler would do all
// multiplications of a step first, and has no registers for what they give.
inline Ints dot_add(Ints sum, Pairs a, Pairs b) {
    Ints product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
    return sum;
}

// The same in one instruction of AVX-VNNI. In assembly: the library must load without it.
struct VnniDot {
    Ints operator()(Ints sum, Pairs a, Pairs b) const {
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
        return sum;
    }
};

// kLanes fours of bytes.
using Fours = __m256i;

// The bits of `mask` of each byte, after a shift to the right, or to the left if kShift is below 0.
template <int kShift>
inline Fours load_bits(const std::uint8_t *fours, std::uint8_t mask) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(fours));
    const __m256i shifted = kShift >= 0 ? _mm256_srli_epi16(bytes, kShift < 0 ? 0 : kShift)
                                        : _mm256_slli_epi16(bytes, kShift < 0 ? -kShift : 0);
    return _mm256_and_si256(shifted, _mm256_set1_epi8(static_cast<char>(mask)));
}

inline Fours unite(Fours a, Fours b) { return _mm256_or_si256(a, b); }

// Four bytes of inputs in each lane.
inline __m256i broadcast_fours(const std::int8_t *inputs) {
    return _mm256_set1_epi32(*reinterpret_cast<const FourBytes *>(inputs));
}

// sum + the four products of each lane; weights are 0 .. 63, so that two products fit in 16 bits.
struct PlainFours {
    Ints operator()(Ints sum, Fours weights, __m256i inputs) const {
        const __m256i pairs = _mm256_maddubs_epi16(weights, inputs);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};

// The same in one instruction of AVX-VNNI. In assembly: the library must load without it.
struct VnniFours {
    Ints operator()(Ints sum, Fours weights, __m256i inputs) const {
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(inputs));
        return sum;
    }
};

}  // namespace loraplex
