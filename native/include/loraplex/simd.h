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

// Lanes are added pairwise, in one order on every instruction set with as many lanes.
inline float sum_lanes(Floats value) {
    float lanes[kLanes];
    store(lanes, value);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) {
            lanes[lane] += lanes[lane + width];
        }
    }
    return lanes[0];
}

inline float max_lane(Floats value) {
    float lanes[kLanes];
    store(lanes, value);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) {
            lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
        }
    }
    return lanes[0];
}

}  // namespace loraplex
