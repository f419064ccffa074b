// Rows of small work, one vector after another; and the sum of two rows.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "loraplex/simd.h"

namespace loraplex {

// body(first, count) for kLanes neighbours at a time; the last time perhaps for fewer.
template <typename Body>
inline void for_each_vector(std::int64_t n, const Body &body) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        body(i, kLanes);
    }
    if (i < n) {
        body(i, static_cast<int>(n - i));
    }
}

template <typename T>
inline Floats load_up_to(const T *source, int count) {
    return count == kLanes ? load(source) : load_first(source, count);
}

template <typename T>
inline void store_up_to(T *target, Floats value, int count) {
    if (count == kLanes) {
        store(target, value);
    } else {
        store_first(target, value, count);
    }
}

// sum = factor * x + residual, rounded to T once.
template <typename T>
void add_rows(const T *x, const T *residual, std::int64_t n, float factor, T *sum) {
    for_each_vector(n, [&](std::int64_t first, int count) {
        store_up_to(sum + first,
                    multiply_add(load_up_to(x + first, count), broadcast(factor),
                                 load_up_to(residual + first, count)),
                    count);
    });
}

inline void check(bool is_valid, const char *op) {
    if (!is_valid) {
        throw std::invalid_argument(op);
    }
}

}  // namespace loraplex
