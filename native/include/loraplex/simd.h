// One vector of float32 per instruction set: `Floats`, with kLanes lanes. Nothing else may differ.
// `Ints` has as many of int32, `Pairs` twice as many of int16, and `Fours` four times as many bytes.
//
// Loads and stores take float, Bfloat16 and Float16, at any alignment; loads take int8_t, too. The
// arithmetic is float32.
// Compiled without contraction: a multiplication and an addition are one rounding only where
// `multiply_add` says so.
#pragma once

#include <cstdint>
#include <cstring>

#include "loraplex/dtype.h"

namespace loraplex {

// Four inputs of int8.
using FourBytes __attribute__((may_alias)) = std::int32_t;

}  // namespace loraplex

#if defined(LORAPLEX_ISA_X86_64_V4)
#include "loraplex/simd_avx512.h"
#elif defined(LORAPLEX_ISA_X86_64_V3)
#include "loraplex/simd_avx2.h"
#elif defined(LORAPLEX_ISA_NEON)
#include "loraplex/simd_neon.h"
#else
#include "loraplex/simd_generic.h"
#endif

namespace loraplex {

// The first `count` of kLanes lanes; the others are 0. Reads no further.
template <typename T>
inline Floats load_first(const T *source, int count) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, source, static_cast<std::size_t>(count) * sizeof(T));
    return load(lanes);
}

template <typename T>
inline void store_first(T *target, Floats value, int count) {
    T lanes[kLanes];
    store(lanes, value);
    std::memcpy(target, lanes, static_cast<std::size_t>(count) * sizeof(T));
}

// Lane i is joined with lane i + kWidth of 2 * kWidth, until one is left: the same order on every
// instruction set with as many lanes. Each width is a type's, else compilers make a loop of it that
// takes several times as long.
template <int kWidth, typename Join>
inline float join_lanes(const float *lanes, const Join &join) {
    float joined[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {
        joined[lane] = join(lanes[lane], lanes[lane + kWidth]);
    }
    if constexpr (kWidth == 1) {
        return joined[0];
    } else {
        return join_lanes<kWidth / 2>(joined, join);
    }
}

inline float sum_lanes(Floats value) {
    float lanes[kLanes];
    store(lanes, value);
    return join_lanes<kLanes / 2>(lanes, [](float a, float b) { return a + b; });
}

inline float max_lane(Floats value) {
    float lanes[kLanes];
    store(lanes, value);
    return join_lanes<kLanes / 2>(lanes, [](float a, float b) { return a > b ? a : b; });
}

}  // namespace loraplex
