// simd.h for aarch64 with NEON.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "loraplex/dtype.h"

namespace loraplex {

using Floats = float32x4_t;
inline constexpr int kLanes = 4;

inline Floats zeros() { return vdupq_n_f32(0.0f); }
inline Floats broadcast(float value) { return vdupq_n_f32(value); }

inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }
inline Floats maximum(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats minimum(Floats a, Floats b) { return vminq_f32(a, b); }

// a * b + c, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }

// To the nearest integer, ties to even.
inline Floats round_to_integer(Floats a) { return vrndnq_f32(a); }

// Lanes 2 i and 2 i + 1 in each other's place.
inline Floats swap_neighbours(Floats a) { return vrev64q_f32(a); }

// 2^n for whole n in [-126, 127].
inline Floats power_of_two(Floats n) {
    const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(biased, 23));
}

inline Floats load(const float *source) { return vld1q_f32(source); }

inline Floats load(const Bfloat16 *source) {
    const uint16x4_t halves = vld1_u16(reinterpret_cast<const std::uint16_t *>(source));
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
}

inline Floats load(const Float16 *source) {
    const uint16x4_t halves = vld1_u16(reinterpret_cast<const std::uint16_t *>(source));
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

inline Floats load(const std::int8_t *source) {
    std::int32_t four;
    std::memcpy(&four, source, sizeof(four));
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

// Of kLanes pairs (a0, b0, a1, b1, ...): the a's, and the b's.
inline Floats load_firsts(const Bfloat16 *pairs) {
    const uint16x8_t bits = vld1q_u16(reinterpret_cast<const std::uint16_t *>(pairs));
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(bits), 16));
}

inline Floats load_seconds(const Bfloat16 *pairs) {
    const uint16x8_t bits = vld1q_u16(reinterpret_cast<const std::uint16_t *>(pairs));
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(bits), high));
}

inline void store(float *target, Floats value) { vst1q_f32(target, value); }

inline void store(Bfloat16 *target, Floats value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded =
        vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    const uint32x4_t quiet = vorrq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(0x40));
    const uint32x4_t is_number = vceqq_f32(value, value);
    const uint16x4_t halves = vmovn_u32(vbslq_u32(is_number, rounded, quiet));
    vst1_u16(reinterpret_cast<std::uint16_t *>(target), halves);
}

inline void store(Float16 *target, Floats value) {
    const uint16x4_t halves = vreinterpret_u16_f16(vcvt_f16_f32(value));
    vst1_u16(reinterpret_cast<std::uint16_t *>(target), halves);
}

// kLanes sums of int32.
using Ints = int32x4_t;
// kLanes pairs of int16.
using Pairs = int16x8_t;

inline Ints zero_ints() { return vdupq_n_s32(0); }
inline Floats to_floats(Ints value) { return vcvtq_f32_s32(value); }
inline Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Ints multiply(Ints a, Ints b) { return vmulq_s32(a, b); }
inline Ints broadcast(std::int32_t value) { return vdupq_n_s32(value); }

inline Ints load_ints(const std::int8_t *source) {
    std::int32_t bits;
    std::memcpy(&bits, source, sizeof(bits));
    return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(static_cast<std::uint32_t>(bits)))));
}

inline Pairs broadcast_pair(const std::int16_t *pair) {
    std::int32_t bits;
    std::memcpy(&bits, pair, sizeof(bits));
    return vreinterpretq_s16_s32(vdupq_n_s32(bits));
}

inline Pairs load_pairs(const std::int8_t *pairs) { return vmovl_s8(vld1_s8(pairs)); }

// Of kLanes pairs of 16-bit words: the signed nibbles at bit 4 * kNibble. Little endian.
template <int kNibble>
inline Pairs load_nibbles(const std::uint8_t *words) {
    const int16x8_t bits = vreinterpretq_s16_u8(vld1q_u8(words));
    return vshrq_n_s16(vshlq_n_s16(bits, 12 - 4 * kNibble), 12);
}

// 16 int16 by number: their low bytes, and their high bytes.
struct TableEntries {
    uint8x16_t low;
    uint8x16_t high;

    explicit TableEntries(const std::uint8_t *table)
        : low(vld1q_u8(table)), high(vld1q_u8(table + 16)) {}
};

// Of a panel's four inputs, as Table4 has them: the entries of pair kPair of the outputs of one of
// its vectors. Little endian.
template <int kPair>
inline Pairs load_entries(const std::uint8_t *fours, int vector, const TableEntries &table) {
    const uint8x8_t bytes = vld1_u8(fours + vector % 2 * 16 + vector / 2 * 8);
    const uint8x8_t numbers = kPair == 0 ? vand_u8(bytes, vdup_n_u8(0xf)) : vshr_n_u8(bytes, 4);
    const uint8x8_t low = vqtbl1_u8(table.low, numbers);
    const uint8x8_t high = vqtbl1_u8(table.high, numbers);
    return vreinterpretq_s16_u8(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)));
}

// sum + a0 * b0 + a1 * b1 of each pair; nothing overflows.
inline Ints dot_add(Ints sum, Pairs a, Pairs b) {
    const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
    return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(a, b)));
}

// kLanes fours of bytes.
using Fours = uint8x16_t;

// The bits of `mask` of each byte, after a shift to the right, or to the left if kShift is below 0.
template <int kShift>
inline Fours load_bits(const std::uint8_t *fours, std::uint8_t mask) {
    return vandq_u8(vshlq_u8(vld1q_u8(fours), vdupq_n_s8(-kShift)), vdupq_n_u8(mask));
}

inline Fours unite(Fours a, Fours b) { return vorrq_u8(a, b); }

// Four bytes of inputs in each lane.
inline int8x16_t broadcast_fours(const std::int8_t *inputs) {
    return vreinterpretq_s8_s32(vdupq_n_s32(*reinterpret_cast<const FourBytes *>(inputs)));
}

// sum + the four products of each lane; weights are 0 .. 63, so that two products fit in 16 bits.
struct PlainFours {
    Ints operator()(Ints sum, Fours weights, int8x16_t inputs) const {
        const int8x16_t values = vreinterpretq_s8_u8(weights);
        const int16x8_t low = vmull_s8(vget_low_s8(values), vget_low_s8(inputs));
        const int16x8_t high = vmull_high_s8(values, inputs);
        return vaddq_s32(sum, vpaddlq_s16(vpaddq_s16(low, high)));
    }
};

// The same in one instruction for dot products. In assembly: the library must load without it.
struct VnniFours {
    __attribute__((always_inline)) Ints operator()(Ints sum, Fours weights,
                                                   int8x16_t inputs) const {
        asm(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
            : "+w"(sum)
            : "w"(weights), "w"(inputs));
        return sum;
    }
};

}  // namespace loraplex
