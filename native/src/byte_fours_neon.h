// Fours of bytes by the dot products of aarch64.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "linear_group_inputs.h"
#include "loraplex/simd.h"
#include "packed_weight.h"

namespace loraplex {

// The fours of one vector of a panel's outputs: value + GroupInputs::kZero.
template <typename W>
struct ByteUnpacking {
    template <int kFour>
    __attribute__((always_inline)) int8x16_t fours(const W *panel, int vector) const {
        const auto *bytes = reinterpret_cast<const std::uint8_t *>(panel);
        if constexpr (kHasNibbles<W>) {
            const uint8x16_t nibbles = veorq_u8(vld1q_u8(bytes + 16 * vector), vdupq_n_u8(0x88));
            return vreinterpretq_s8_u8(kFour == 0 ? vandq_u8(nibbles, vdupq_n_u8(0x0f))
                                                  : vshrq_n_u8(nibbles, 4));
        } else {
            // Bytes have a pair of inputs of each output, then the next pair.
            const uint16x8_t firsts = vreinterpretq_u16_u8(vld1q_u8(bytes + vector / 2 * 16));
            const uint16x8_t seconds = vreinterpretq_u16_u8(vld1q_u8(bytes + 32 + vector / 2 * 16));
            return vreinterpretq_s8_u16(vector % 2 == 0 ? vzip1q_u16(firsts, seconds)
                                                        : vzip2q_u16(firsts, seconds));
        }
    }
};

inline Ints add_to_all(Ints sums, std::int32_t value) {
    return vaddq_s32(sums, vdupq_n_s32(value));
}

// In assembly: the library must load without it.
__attribute__((always_inline)) inline Ints add_fours(int8x16_t inputs, int8x16_t weights,
                                                     Ints sum) {
    asm(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
        : "+w"(sum)
        : "w"(weights), "w"(inputs));
    return sum;
}

}  // namespace loraplex
