// Rows of float32, bfloat16 or float16 that LoRA reads and adds to.
//
// Their type is that of two functions, called for some hundred elements at a time: so the products
// themselves are compiled for the types of pages only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "loraplex/dtype.h"
#include "loraplex/simd.h"

namespace loraplex {

// Into the nearest cache. Inlined, as what calls it must be: GCC takes a function that does nothing
// else for one without effect, and leaves its calls out.
template <typename T>
__attribute__((always_inline)) inline void read_ahead(const T *elements, std::int64_t count) {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    for (std::int64_t i = 0; i < count; i += kLine) {
        __builtin_prefetch(elements + i);
    }
}

// x[rows, stride]
class InputRows {
public:
    InputRows(loraplex_dtype dtype, const void *x, std::int64_t stride) : x_(x), stride_(stride) {
        const loraplex_status status = for_dtype(dtype, [this]<typename T>(T) {
            widened_ = &widened_elements<T>;
            size_ = sizeof(T);
            return LORAPLEX_OK;
        });
        if (status != LORAPLEX_OK) {
            throw std::invalid_argument("dtype of LoRA's rows");
        }
    }

    // Elements of a row as float32: where they lie, or in memory for `count` of them.
    const float *widened(std::int64_t row, std::int64_t first, std::int64_t count,
                         float *memory) const {
        return widened_(x_, row * stride_ + first, count, memory);
    }

    __attribute__((always_inline)) void read_ahead(std::int64_t row, std::int64_t first,
                                                   std::int64_t count) const {
        const auto *bytes = static_cast<const std::byte *>(x_);
        loraplex::read_ahead(bytes + (row * stride_ + first) * size_, count * size_);
    }

private:
    template <typename T>
    static const float *widened_elements(const void *x, std::int64_t first, std::int64_t count,
                                         float *memory) {
        const T *source = static_cast<const T *>(x) + first;
        if constexpr (std::is_same_v<T, float>) {
            return source;
        } else {
            std::int64_t i = 0;
            for (; i + kLanes <= count; i += kLanes) {
                store(memory + i, load(source + i));
            }
            for (; i < count; ++i) {
                memory[i] = widen(source[i]);
            }
            return memory;
        }
    }

    const void *x_;
    std::int64_t stride_;
    std::int64_t size_ = 0;  // of an element
    const float *(*widened_)(const void *, std::int64_t, std::int64_t, float *) = nullptr;
};

// y[rows, stride]
class OutputRows : public InputRows {
public:
    OutputRows(loraplex_dtype dtype, void *y, std::int64_t stride)
        : InputRows(dtype, y, stride), y_(y), stride_(stride) {
        for_dtype(dtype, [this]<typename T>(T) {
            add_ = &add_elements<T>;
            return LORAPLEX_OK;
        });
    }

    // y[row][first : first + count] += sums
    void add(std::int64_t row, std::int64_t first, std::int64_t count, const float *sums) const {
        add_(y_, row * stride_ + first, count, sums);
    }

private:
    template <typename T>
    static void add_elements(void *y, std::int64_t first, std::int64_t count, const float *sums) {
        T *target = static_cast<T *>(y) + first;
        std::int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            store(target + i, loraplex::add(load(target + i), load(sums + i)));
        }
        for (; i < count; ++i) {
            target[i] = narrow<T>(widen(target[i]) + sums[i]);
        }
    }

    void *y_;
    std::int64_t stride_;
    void (*add_)(void *, std::int64_t, std::int64_t, const float *) = nullptr;
};

}  // namespace loraplex
