// Activations of one vector.
#pragma once

#include "exponential.h"
#include "loraplex/elementwise.h"
#include "loraplex/simd.h"

namespace loraplex {

// x / (1 + e^(-slope x))
inline Floats swish(Floats x, float slope) {
    const Floats exponential = exp2(multiply(x, broadcast(-slope * kLog2E)));
    return divide(x, add(broadcast(1.0f), exponential));
}

inline Floats silu(Floats x) { return swish(x, 1.0f); }

inline Floats relu(Floats x) {
    // In this order NaN comes through on every instruction set.
    return maximum(zeros(), x);
}

// x / (1 + e^(-2 u)) = x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Floats gelu_tanh(Floats x) {
    const Floats cubic = multiply_add(multiply(x, x), broadcast(0.044715f), broadcast(1.0f));
    const Floats u = multiply(multiply(x, cubic), broadcast(-2.0f * 0.797884560802865356f));
    return divide(x, add(broadcast(1.0f), exp2(multiply(u, broadcast(kLog2E)))));
}

// erfc(z) for z in [0, 12], within 1e-6 of its value: e^(-z^2) t p(t), t = 1 / (1 + z / 2), where p
// is the polynomial nearest to erfc(z) e^(z^2) / t at Chebyshev's points.
inline Floats erfc(Floats z) {
    const Floats t = divide(broadcast(1.0f), multiply_add(z, broadcast(0.5f), broadcast(1.0f)));
    Floats series = broadcast(-6.01972491e-02f);
    series = multiply_add(series, t, broadcast(2.89869040e-01f));
    series = multiply_add(series, t, broadcast(-4.97684866e-01f));
    series = multiply_add(series, t, broadcast(2.89468139e-01f));
    series = multiply_add(series, t, broadcast(-3.40365209e-02f));
    series = multiply_add(series, t, broadcast(2.05621541e-01f));
    series = multiply_add(series, t, broadcast(2.42415696e-01f));
    series = multiply_add(series, t, broadcast(2.82462269e-01f));
    series = multiply_add(series, t, broadcast(2.82081902e-01f));
    const Floats power = exp2(multiply(multiply(z, z), broadcast(-kLog2E)));
    return multiply(multiply(power, t), series);
}

// x Phi(x) = max(x, 0) - |x| erfc(|x| / sqrt 2) / 2. Beyond 16 the second part is 0.
inline Floats gelu(Floats x) {
    const Floats magnitude = maximum(x, subtract(zeros(), x));
    const Floats limited = minimum(broadcast(16.0f), magnitude);
    const Floats tail = erfc(multiply(limited, broadcast(0.707106781186547524f)));
    return subtract(relu(x), multiply(multiply(limited, broadcast(0.5f)), tail));
}

// positive x^2 + x / 2 above zero, negative (e^x - 1 - x) + x / 2 below. e^x - 1 is
// (e^x + 1) tanh(x / 2), which is as exact near zero.
inline Floats xielu(Floats x, Floats positive, Floats negative) {
    const Floats half = broadcast(0.5f);
    // In this order NaN comes through on every instruction set.
    const Floats above = maximum(zeros(), x);
    const Floats below = minimum(zeros(), x);
    const Floats power = exp2(multiply(below, broadcast(kLog2E)));
    const Floats rise = multiply(add(power, broadcast(1.0f)), tanh(multiply(below, half)));
    const Floats curve = multiply(negative, subtract(rise, below));
    return multiply_add(x, half, multiply_add(multiply(above, above), positive, curve));
}

// body(function of Floats) for an activation's number
template <typename Body>
loraplex_status for_activation(loraplex_activation activation, const Body &body) {
    switch (activation) {
        case LORAPLEX_GELU:
            body([](Floats x) { return gelu(x); });
            return LORAPLEX_OK;
        case LORAPLEX_GELU_TANH:
            body([](Floats x) { return gelu_tanh(x); });
            return LORAPLEX_OK;
        case LORAPLEX_RELU:
            body([](Floats x) { return relu(x); });
            return LORAPLEX_OK;
        case LORAPLEX_SQUARED_RELU:
            body([](Floats x) { return multiply(relu(x), relu(x)); });
            return LORAPLEX_OK;
        case LORAPLEX_SILU:
            body([](Floats x) { return silu(x); });
            return LORAPLEX_OK;
        default:
            return LORAPLEX_INVALID_ARGUMENT;
    }
}

}  // namespace loraplex
