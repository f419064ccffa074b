// Groups of 32 values of GGUF's types without levels of scales (llama.cpp's ggml-quants.c).
//
// A value is (code - zero) * scale - offset, or table[code] * scale. Scales are float16 in files, but
// those of MXFP4.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gguf_blocks.h"

namespace loraplex {

inline constexpr int kGroupValues = 32;

// Codes in their order, eight in each word, the first one in its lowest byte.
struct GroupOfValues {
    std::uint64_t codes[kGroupValues / 8];
    float scale;
    float offset = 0;
};

inline constexpr std::uint64_t kOnes = 0x0101010101010101u;

inline std::uint64_t eight(const std::uint8_t *bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
}

// Value j is the low half of byte j, and value 16 + j the high one.
inline void decode_halves(const std::uint8_t *bytes, std::uint64_t *codes) {
    for (int i = 0; i < 2; ++i) {
        const std::uint64_t word = eight(bytes + 8 * i);
        codes[i] = word & 15 * kOnes;
        codes[2 + i] = word >> 4 & 15 * kOnes;
    }
}

// Byte j is 16 if bit j of eight is set: each bit is left alone in its byte, and 127 carries it to the top.
inline std::uint64_t fifth_bits(std::uint8_t bits) {
    const std::uint64_t alone = bits * kOnes & 0x8040201008040201u;
    return (alone + 0x7f * kOnes) >> 3 & 16 * kOnes;
}

// A number of kBits bits for each value. Without a zero a block has a minimum, which moves with the
// codes: d q + m = d (q - z) - (-z d - m).
template <int kBits, bool kHasMinimum>
struct GroupInHalves {
    static constexpr int kBytes = 2 + (kHasMinimum ? 2 : 0) + (kBits > 4 ? 4 : 0) + 16;
    static constexpr int kGroups = 1;
    static constexpr int kZero = 1 << (kBits - 1);
    static constexpr bool kIsWide = kBits > 4;
    static constexpr bool kHasOffset = kHasMinimum;
    static constexpr const std::int8_t *kTable = nullptr;

    static void decode(const std::uint8_t *block, int /*group*/, GroupOfValues &result) {
        result.scale = read_half(block);
        const std::uint8_t *bytes = block + 2;
        if constexpr (kHasMinimum) {
            result.offset = -static_cast<float>(kZero) * result.scale - read_half(bytes);
            bytes += 2;
        }
        decode_halves(block + kBytes - 16, result.codes);
        if constexpr (kBits > 4) {
            for (int i = 0; i < kGroupValues / 8; ++i) {
                result.codes[i] |= fifth_bits(bytes[i]);
            }
        }
    }
};

using Q40 = GroupInHalves<4, false>;
using Q41 = GroupInHalves<4, true>;
using Q50 = GroupInHalves<5, false>;
using Q51 = GroupInHalves<5, true>;

struct Q80 {
    static constexpr int kBytes = 34;
    static constexpr int kGroups = 1;
    static constexpr int kZero = 0;
    static constexpr bool kIsWide = true;
    static constexpr bool kHasOffset = false;
    static constexpr const std::int8_t *kTable = nullptr;

    static void decode(const std::uint8_t *block, int /*group*/, GroupOfValues &result) {
        result.scale = read_half(block);
        for (int i = 0; i < kGroupValues / 8; ++i) {
            result.codes[i] = eight(block + 2 + 8 * i);
        }
    }
};

inline constexpr std::int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
// Twice the numbers of e2m1, whose scales are halved.
inline constexpr std::int8_t kDoubledFloats[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                   0, -1, -2, -3, -4, -6, -8, -12};

struct Iq4Nl {
    static constexpr int kBytes = 18;
    static constexpr int kGroups = 1;
    static constexpr int kZero = 0;
    static constexpr bool kIsWide = false;
    static constexpr bool kHasOffset = false;
    static constexpr const std::int8_t *kTable = kNonLinear;

    static void decode(const std::uint8_t *block, int /*group*/, GroupOfValues &result) {
        result.scale = read_half(block);
        decode_halves(block + 2, result.codes);
    }
};

struct Iq4Xs {
    static constexpr int kBytes = 136;
    static constexpr int kGroups = 8;
    static constexpr int kZero = 0;
    static constexpr bool kIsWide = false;
    static constexpr bool kHasOffset = false;
    static constexpr const std::int8_t *kTable = kNonLinear;

    // The scales of groups 2 j and 2 j + 1 have their low bits in the halves of byte j.
    static void decode(const std::uint8_t *block, int group, GroupOfValues &result) {
        std::uint16_t high;
        std::memcpy(&high, block + 2, sizeof(high));
        const int low = block[4 + group / 2] >> group % 2 * 4 & 15;
        const int factor = (low | (high >> 2 * group & 3) << 4) - 32;
        result.scale = read_half(block) * static_cast<float>(factor);
        decode_halves(block + 8 + 16 * group, result.codes);
    }
};

struct Mxfp4 {
    static constexpr int kBytes = 17;
    static constexpr int kGroups = 1;
    static constexpr int kZero = 0;
    static constexpr bool kIsWide = false;
    static constexpr bool kHasOffset = false;
    static constexpr const std::int8_t *kTable = kDoubledFloats;

    // 2^(e - 127), half of it: the exponent of a float32; 2^-127 is subnormal, and 255 no number.
    static void decode(const std::uint8_t *block, int /*group*/, GroupOfValues &result) {
        const std::uint32_t exponent = block[0];
        const std::uint32_t bits = exponent == 0 ? 0x00400000u : exponent << 23;
        result.scale = std::bit_cast<float>(bits) * 0.5f;
        decode_halves(block + 1, result.codes);
    }
};

// body(Type{}) with what a number of a file means; what it returns.
template <typename Body>
loraplex_status for_group_type(loraplex_gguf_type type, const Body &body) {
    switch (type) {
        case LORAPLEX_GGUF_Q4_0:
            return body(Q40{});
        case LORAPLEX_GGUF_Q4_1:
            return body(Q41{});
        case LORAPLEX_GGUF_Q5_0:
            return body(Q50{});
        case LORAPLEX_GGUF_Q5_1:
            return body(Q51{});
        case LORAPLEX_GGUF_Q8_0:
            return body(Q80{});
        case LORAPLEX_GGUF_IQ4_NL:
            return body(Iq4Nl{});
        case LORAPLEX_GGUF_IQ4_XS:
            return body(Iq4Xs{});
        case LORAPLEX_GGUF_MXFP4:
            return body(Mxfp4{});
        default:
            return LORAPLEX_INVALID_ARGUMENT;
    }
}

}  // namespace loraplex
