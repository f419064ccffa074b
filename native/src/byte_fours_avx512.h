// Fours of bytes by AVX512-VNNI.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "linear_group_inputs.h"
#include "loraplex/simd.h"
#include "packed_weight.h"

namespace loraplex {

// The fours of a panel's outputs, as unsigned bytes: value + GroupInputs::kZero.
template <typename W>
class ByteUnpacking {
public:
    template <int kFour>
    __attribute__((always_inline)) __m512i fours(const W *panel, int /*vector*/) const {
        const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(panel), signs_);
        if constexpr (!kHasNibbles<W>) {
            return _mm512_permutexvar_epi16(choice_, bytes);
        } else {
            return _mm512_and_si512(kFour == 0 ? bytes : _mm512_srli_epi16(bytes, 4), choice_);
        }
    }

private:
    struct Constants {
        alignas(64) std::uint8_t signs[64];
        alignas(64) std::uint16_t choice[32];
    };

    static constexpr Constants make_constants() {
        Constants result{};
        std::fill(std::begin(result.signs), std::end(result.signs),
                  std::uint8_t{kHasNibbles<W> ? 0x88 : 0x80});
        for (std::uint16_t i = 0; i < 32; ++i) {
            // Bytes have a pair of inputs of each output, then the next pair.
            result.choice[i] = kHasNibbles<W> ? 0x0f0f : i / 2 + i % 2 * 16;
        }
        return result;
    }

    // Volatile: a compiler would keep the constants of one group for the next, and move sums to
    // memory instead.
    static __m512i read(const void *constant) {
        return *static_cast<const volatile __m512i *>(constant);
    }

    static constexpr Constants kConstants = make_constants();

    __m512i signs_ = read(kConstants.signs);
    __m512i choice_ = read(kConstants.choice);
};

inline Ints add_to_all(Ints sums, std::int32_t value) {
    return _mm512_add_epi32(sums, _mm512_set1_epi32(value));
}

inline Ints add_fours(Fours inputs, Fours weights, Ints sum) {
    return VnniFours{}(sum, weights, inputs);
}

}  // namespace loraplex
