// Powers of two, sigmoid, softplus and tanh, lane by lane: a value's result depends on nothing but the value.
#pragma once

#include <initializer_list>

#include "loraplex/simd.h"

namespace loraplex {

inline constexpr float kLog2E = 1.44269504088896341f;

// 2^x within 2 units in the last place; 0 below 2^-126, infinity from 2^128 on, NaN of NaN.
//
// 2^x = 2^n * 2^f with whole n and |f| <= 1/2; 2^f by its Taylor series, whose first term left out,
// (f ln 2)^8 / 8!, is below 6e-9. An n of -127 or 128 makes power_of_two's exponent bits all 0 or
// all 1, which is 0 or infinity.
inline Floats exp2(Floats x) {
    // In this order NaN comes through on every instruction set.
    const Floats limited = minimum(broadcast(128.0f), maximum(broadcast(-127.0f), x));
    const Floats n = round_to_integer(limited);
    const Floats f = subtract(limited, n);
    Floats series = broadcast(1.5252733804059841e-05f);
    series = multiply_add(series, f, broadcast(1.5403530393381608e-04f));
    series = multiply_add(series, f, broadcast(1.3333558146428443e-03f));
    series = multiply_add(series, f, broadcast(9.6181291076284772e-03f));
    series = multiply_add(series, f, broadcast(5.5504108664821580e-02f));
    series = multiply_add(series, f, broadcast(2.4022650695910071e-01f));
    series = multiply_add(series, f, broadcast(6.9314718055994531e-01f));
    series = multiply_add(series, f, broadcast(1.0f));
    return multiply(series, power_of_two(n));
}

inline float exp2(float x) {
    float lanes[kLanes];
    store(lanes, exp2(broadcast(x)));
    return lanes[0];
}

// 1 / (1 + e^-x)
inline Floats sigmoid(Floats x) {
    const Floats exponential = exp2(multiply(x, broadcast(-kLog2E)));
    return divide(broadcast(1.0f), add(broadcast(1.0f), exponential));
}

// log(1 + y) for y in [0, 1], within 2e-7 of its value: 2 artanh(y / (2 + y)) by its series, whose
// first term left out is below 2e-8 of the first.
inline Floats log1p(Floats y) {
    const Floats z = divide(y, add(y, broadcast(2.0f)));
    const Floats square = multiply(z, z);
    Floats series = broadcast(1.0f / 13.0f);
    for (const float term : {11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) {
        series = multiply_add(series, square, broadcast(1.0f / term));
    }
    return multiply(multiply(z, broadcast(2.0f)), series);
}

// log(1 + e^x)
inline Floats softplus(Floats x) {
    const Floats magnitude = maximum(x, subtract(zeros(), x));
    const Floats small = exp2(multiply(magnitude, broadcast(-kLog2E)));
    // In this order NaN comes through on every instruction set.
    return add(maximum(zeros(), x), log1p(small));
}

// tanh x within 4e-7 of its value (relative), 0 of 0, NaN of NaN. It is x p(x^2) / q(x^2), which is
// nearest to tanh on [-9, 9]; beyond, tanh rounds to 1 and -1, and the quotient at 9 is 1.
inline Floats tanh(Floats x) {
    // In this order NaN comes through on every instruction set.
    const Floats limited = minimum(broadcast(9.0f), maximum(broadcast(-9.0f), x));
    const Floats square = multiply(limited, limited);
    Floats p = broadcast(1.33546319e-08f);
    p = multiply_add(p, square, broadcast(2.06090594e-05f));
    p = multiply_add(p, square, broadcast(3.49558668e-03f));
    p = multiply_add(p, square, broadcast(1.33810244e-01f));
    p = multiply_add(p, square, broadcast(1.0f));
    Floats q = broadcast(7.77654572e-07f);
    q = multiply_add(q, square, broadcast(3.28563248e-04f));
    q = multiply_add(q, square, broadcast(2.58769766e-02f));
    q = multiply_add(q, square, broadcast(4.67143400e-01f));
    q = multiply_add(q, square, broadcast(1.0f));
    return divide(multiply(limited, p), q);
}

}  // namespace loraplex
