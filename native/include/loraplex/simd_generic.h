// simd.h for any CPU, with the vector types that gcc and clang have everywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "loraplex/dtype.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace loraplex {

using Floats = float __attribute__((vector_size(16)));
inline constexpr int kLanes = 4;

inline Floats broadcast(float value) { return Floats{value, value, value, value}; }
inline Floats zeros() { return broadcast(0.0f); }

inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats subtract(Floats a, Floats b) { return a - b; }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats divide(Floats a, Floats b) { return a / b; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }

// a * b + c; rounded once only where the CPU can.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FP_FAST_FMAF)
    for (int lane = 0; lane < kLanes; ++lane) {
        c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    }
    return c;
#else
    return a * b + c;
#endif
}

// To the nearest integer, ties to even.
inline Floats round_to_integer(Floats a) {
    for (int lane = 0; lane < kLanes; ++lane) {
        a[lane] = std::nearbyintf(a[lane]);
    }
    return a;
}

// Lanes 2 i and 2 i + 1 in each other's place.
inline Floats swap_neighbours(Floats a) { return Floats{a[1], a[0], a[3], a[2]}; }

// 2^n for whole n in [-126, 127].
inline Floats power_of_two(Floats n) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const auto biased = static_cast<std::uint32_t>(static_cast<int>(n[lane]) + 127);
        n[lane] = std::bit_cast<float>(biased << 23);
    }
    return n;
}

template <typename T>
inline Floats load(const T *source) {
    Floats value;
    for (int lane = 0; lane < kLanes; ++lane) {
        value[lane] = widen(source[lane]);
    }
    return value;
}

inline Floats load(const float *source) {
    Floats value;
    std::memcpy(&value, source, sizeof(value));
    return value;
}

// Of kLanes pairs (a0, b0, a1, b1, ...): the a's, and the b's.
inline Floats load_firsts(const Bfloat16 *pairs) {
    return Floats{widen(pairs[0]), widen(pairs[2]), widen(pairs[4]), widen(pairs[6])};
}

inline Floats load_seconds(const Bfloat16 *pairs) { return load_firsts(pairs + 1); }

template <typename T>
inline void store(T *target, Floats value) {
    for (int lane = 0; lane < kLanes; ++lane) {
        target[lane] = narrow<T>(value[lane]);
    }
}

// kLanes sums of int32.
using Ints = std::int32_t __attribute__((vector_size(16)));
// kLanes pairs of int16.
using Pairs = std::int16_t __attribute__((vector_size(16)));

inline Ints zero_ints() { return Ints{}; }
inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }
inline Ints add(Ints a, Ints b) { return a + b; }
inline Ints multiply(Ints a, Ints b) { return a * b; }
inline Ints broadcast(std::int32_t value) { return Ints{value, value, value, value}; }

inline Ints load_ints(const std::int8_t *source) {
    return Ints{source[0], source[1], source[2], source[3]};
}

inline Pairs broadcast_pair(const std::int16_t *pair) {
    return Pairs{pair[0], pair[1], pair[0], pair[1], pair[0], pair[1], pair[0], pair[1]};
}

inline Pairs load_pairs(const std::int8_t *pairs) {
    std::int8_t bytes __attribute__((vector_size(8)));
    std::memcpy(&bytes, pairs, sizeof(bytes));
    return __builtin_convertvector(bytes, Pairs);
}

// Of kLanes pairs of 16-bit words: the signed nibbles at bit 4 * kNibble.
template <int kNibble>
inline Pairs load_nibbles(const std::uint8_t *words) {
    Pairs bits;
    std::memcpy(&bits, words, sizeof(bits));
    return (bits << (12 - 4 * kNibble)) >> 12;
}

// 16 int16 by number.
struct TableEntries {
    std::int16_t entries[16];

    // table: their low bytes, then their high bytes
    explicit TableEntries(const std::uint8_t *table) {
        for (int i = 0; i < 16; ++i) {
            entries[i] = static_cast<std::int16_t>(table[i] | table[16 + i] << 8);
        }
    }
};

// Of a panel's four inputs, as Table4 has them: the entries of pair kPair of the outputs of one of
// its vectors.
template <int kPair>
inline Pairs load_entries(const std::uint8_t *fours, int vector, const TableEntries &table) {
    const std::uint8_t *bytes = fours + vector % 2 * 16 + vector / 2 * 8;
    Pairs pairs;
    for (int i = 0; i < 2 * kLanes; ++i) {
        pairs[i] = table.entries[bytes[i] >> 4 * kPair & 0xf];
    }
    return pairs;
}

// sum + a0 * b0 + a1 * b1 of each pair; nothing overflows.
inline Ints dot_add(Ints sum, Pairs a, Pairs b) {
#if defined(__SSE2__)
    return sum + reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a),
                                                       reinterpret_cast<__m128i>(b)));
#else
    for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane] += a[2 * lane] * b[2 * lane] + a[2 * lane + 1] * b[2 * lane + 1];
    }
    return sum;
#endif
}

// kLanes fours of bytes.
using Fours = std::uint8_t __attribute__((vector_size(16)));

// The bits of `mask` of each byte, after a shift to the right, or to the left if kShift is below 0.
template <int kShift>
inline Fours load_bits(const std::uint8_t *fours, std::uint8_t mask) {
    Fours bytes;
    std::memcpy(&bytes, fours, sizeof(bytes));
    if constexpr (kShift >= 0) {
        return (bytes >> kShift) & mask;
    } else {
        return (bytes << -kShift) & mask;
    }
}

inline Fours unite(Fours a, Fours b) { return a | b; }

// Four bytes of inputs, for each lane.
inline FourBytes broadcast_fours(const std::int8_t *inputs) {
    return *reinterpret_cast<const FourBytes *>(inputs);
}

// sum + the four products of each lane; weights are 0 .. 63.
struct PlainFours {
    Ints operator()(Ints sum, Fours weights, FourBytes inputs) const {
        std::int8_t x[4];
        std::memcpy(x, &inputs, sizeof(x));
        for (int lane = 0; lane < kLanes; ++lane) {
            for (int i = 0; i < 4; ++i) {
                sum[lane] += weights[4 * lane + i] * x[i];
            }
        }
        return sum;
    }
};

}  // namespace loraplex
