// The element types of tensors: float, Bfloat16, Float16, one at a time. simd.h has the vectors.
#pragma once

#include <bit>
#include <cstdint>

#include "loraplex/abi.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace loraplex {

struct Bfloat16 {
    std::uint16_t bits;
};

struct Float16 {
    std::uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(std::int8_t value) { return value; }

inline float widen(Bfloat16 value) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

// IEEE 754 binary16 to binary32, exact.
inline float widen(Float16 value) {
#if defined(__F16C__)
    return _cvtsh_ss(value.bits);
#else
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    const std::uint32_t rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00u) {  // infinity, NaN (made quiet, as the hardware does)
        const std::uint32_t quiet = rest > 0x7c00u ? 0x00400000u : 0u;
        return std::bit_cast<float>(sign | 0x7f800000u | quiet | (rest & 0x3ffu) << 13);
    }
    // The exponent's bias is 112 less. Subnormal values come out right by the multiplication.
    const float magnitude = std::bit_cast<float>(rest << 13) * 0x1p112f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
#endif
}

// To the nearest, ties to even. A NaN stays a NaN.
template <typename T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

template <>
inline Bfloat16 narrow<Bfloat16>(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return {static_cast<std::uint16_t>(bits >> 16 | 0x0040u)};
    }
    return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
inline Float16 narrow<Float16>(float value) {
#if defined(__F16C__)
    return {static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const std::uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) {
        return {static_cast<std::uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x1ffu))};
    }
    if (rest >= 0x477ff000u) {  // 65520: half way from the largest number to the next
        return {static_cast<std::uint16_t>(sign | 0x7c00u)};
    }
    if (rest < 0x38800000u) {  // below 2^-14: adding 1/2 leaves the rounded bits at the bottom
        const float shifted = std::bit_cast<float>(rest) + 0.5f;
        return {static_cast<std::uint16_t>(sign |
                                           (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
    }
    const std::uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
    return {static_cast<std::uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
#endif
}

// body(T{}) with the C++ type of a dtype; what it returns. An unknown dtype is an invalid argument.
template <typename Body>
loraplex_status for_dtype(loraplex_dtype dtype, const Body &body) {
    switch (dtype) {
        case LORAPLEX_FLOAT32:
            return body(float{});
        case LORAPLEX_BFLOAT16:
            return body(Bfloat16{});
        case LORAPLEX_FLOAT16:
            return body(Float16{});
        default:
            return LORAPLEX_INVALID_ARGUMENT;
    }
}

}  // namespace loraplex
