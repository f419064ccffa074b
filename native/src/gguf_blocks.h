// Super-blocks of GGUF's K types (llama.cpp's ggml-quants.c), as codes and whole factors.
//
// A value is (code - zero) * factor * scale - minimum * minimum_scale, the factor and the minimum of its
// group. Scales are float16 in files.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "loraplex/dtype.h"
#include "loraplex/gguf.h"

namespace loraplex {

inline constexpr int kBlockValues = LORAPLEX_SUPER_BLOCK_INPUTS;

struct SuperBlock {
    alignas(64) std::uint8_t codes[kBlockValues];
    std::int8_t factors[16];
    std::int8_t minima[16];
    float scale;
    float minimum_scale;

    bool is_finite() const { return std::isfinite(scale); }
};

inline float read_half(const std::uint8_t *bytes) {
    Float16 half;
    std::memcpy(&half, bytes, sizeof(half));
    return widen(half);
}

// The scales of Q4_K and Q5_K. Twelve bytes hold eight pairs of 6 bits: the first four pairs in the low
// bits of bytes 0 to 3 and 4 to 7, of the others the low halves in bytes 8 to 11 and the upper two bits
// above the first ones.
inline void decode_scales(const std::uint8_t *block, SuperBlock &result) {
    result.scale = read_half(block);
    result.minimum_scale = read_half(block + 2);
    const std::uint8_t *low = block + 4, *high = block + 8, *rest = block + 12;
    for (int i = 0; i < 4; ++i) {
        result.factors[i] = static_cast<std::int8_t>(low[i] & 63);
        result.minima[i] = static_cast<std::int8_t>(high[i] & 63);
        result.factors[4 + i] = static_cast<std::int8_t>((rest[i] & 15) | low[i] >> 6 << 4);
        result.minima[4 + i] = static_cast<std::int8_t>(rest[i] >> 4 | high[i] >> 6 << 4);
    }
}

// Value 128 h + 32 j + i has bits 2 j and 2 j + 1 of byte 32 h + i.
inline void decode_low_two_bits(const std::uint8_t *bytes, std::uint8_t *codes) {
    for (int row = 0; row < kBlockValues / 32; ++row) {
        for (int i = 0; i < 32; ++i) {
            codes[32 * row + i] = bytes[row / 4 * 32 + i] >> row % 4 * 2 & 3;
        }
    }
}

struct Q2K {
    static constexpr int kBytes = 84;
    static constexpr int kGroupSize = 16;
    static constexpr int kZero = 0;
    static constexpr bool kHasMinima = true;
    static constexpr bool kIsNarrow = true;

    static void decode(const std::uint8_t *block, SuperBlock &result) {
        for (int i = 0; i < 16; ++i) {
            result.factors[i] = static_cast<std::int8_t>(block[i] & 15);
            result.minima[i] = static_cast<std::int8_t>(block[i] >> 4);
        }
        decode_low_two_bits(block + 16, result.codes);
        result.scale = read_half(block + 80);
        result.minimum_scale = read_half(block + 82);
    }
};

// d f (q - 4) = d f q - d (4 f), and 4 f fits in 8 bits.
struct Q3K {
    static constexpr int kBytes = 110;
    static constexpr int kGroupSize = 16;
    static constexpr int kZero = 0;
    static constexpr bool kHasMinima = true;
    static constexpr bool kIsNarrow = true;

    static void decode(const std::uint8_t *block, SuperBlock &result) {
        decode_low_two_bits(block + 32, result.codes);
        for (int row = 0; row < kBlockValues / 32; ++row) {
            for (int i = 0; i < 32; ++i) {
                result.codes[32 * row + i] |= (block[i] >> row & 1) << 2;
            }
        }
        // Factors have 6 bits: the low four in the halves of eight bytes, the high two in four bytes.
        for (int i = 0; i < 16; ++i) {
            const int low = block[96 + i % 8] >> i / 8 * 4 & 15;
            const int factor = (low | (block[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
            result.factors[i] = static_cast<std::int8_t>(factor);
            result.minima[i] = static_cast<std::int8_t>(4 * factor);
        }
        result.scale = result.minimum_scale = read_half(block + 108);
    }
};

struct Q4K {
    static constexpr int kBytes = 144;
    static constexpr int kGroupSize = 32;
    static constexpr int kZero = 0;
    static constexpr bool kHasMinima = true;
    static constexpr bool kIsNarrow = true;

    static void decode(const std::uint8_t *block, SuperBlock &result) {
        decode_scales(block, result);
        // 32 bytes have two groups, one in each half.
        for (int pair = 0; pair < 4; ++pair) {
            const std::uint8_t *bytes = block + 16 + 32 * pair;
            std::uint8_t *codes = result.codes + 64 * pair;
            for (int i = 0; i < 32; ++i) {
                codes[i] = bytes[i] & 15;
                codes[32 + i] = bytes[i] >> 4;
            }
        }
    }
};

struct Q5K {
    static constexpr int kBytes = 176;
    static constexpr int kGroupSize = 32;
    static constexpr int kZero = 0;
    static constexpr bool kHasMinima = true;
    static constexpr bool kIsNarrow = false;

    static void decode(const std::uint8_t *block, SuperBlock &result) {
        decode_scales(block, result);
        const std::uint8_t *fifth = block + 16;  // bit j of byte i: of value i of group j
        for (int pair = 0; pair < 4; ++pair) {
            const std::uint8_t *bytes = block + 48 + 32 * pair;
            std::uint8_t *codes = result.codes + 64 * pair;
            for (int i = 0; i < 32; ++i) {
                const int bits = fifth[i] >> 2 * pair;
                codes[i] = static_cast<std::uint8_t>((bytes[i] & 15) | (bits & 1) << 4);
                codes[32 + i] = static_cast<std::uint8_t>(bytes[i] >> 4 | (bits & 2) << 3);
            }
        }
    }
};

struct Q6K {
    static constexpr int kBytes = 210;
    static constexpr int kGroupSize = 16;
    static constexpr int kZero = 32;
    static constexpr bool kHasMinima = false;
    static constexpr bool kIsNarrow = false;

    static void decode(const std::uint8_t *block, SuperBlock &result) {
        for (int half = 0; half < 2; ++half) {
            const std::uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
            std::uint8_t *codes = result.codes + 128 * half;
            for (int i = 0; i < 32; ++i) {
                const int bits = high[i];
                codes[i] = static_cast<std::uint8_t>((low[i] & 15) | (bits & 3) << 4);
                codes[32 + i] = static_cast<std::uint8_t>((low[32 + i] & 15) | (bits & 12) << 2);
                codes[64 + i] = static_cast<std::uint8_t>(low[i] >> 4 | (bits & 48));
                codes[96 + i] = static_cast<std::uint8_t>(low[32 + i] >> 4 | (bits & 192) >> 2);
            }
        }
        std::memcpy(result.factors, block + 192, sizeof(result.factors));
        std::memset(result.minima, 0, sizeof(result.minima));
        result.scale = read_half(block + 208);
        result.minimum_scale = 0;
    }
};

// body(Type{}) with what a number of a file means; what it returns.
template <typename Body>
loraplex_status for_gguf_type(loraplex_gguf_type type, const Body &body) {
    switch (type) {
        case LORAPLEX_GGUF_Q2_K:
            return body(Q2K{});
        case LORAPLEX_GGUF_Q3_K:
            return body(Q3K{});
        case LORAPLEX_GGUF_Q4_K:
            return body(Q4K{});
        case LORAPLEX_GGUF_Q5_K:
            return body(Q5K{});
        case LORAPLEX_GGUF_Q6_K:
            return body(Q6K{});
        default:
            return LORAPLEX_INVALID_ARGUMENT;
    }
}

}  // namespace loraplex
