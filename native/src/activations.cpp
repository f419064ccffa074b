// Activations, alone or times another row.
#include "loraplex/elementwise.h"

#include "activations.h"
#include "loraplex/guard.h"
#include "loraplex/simd.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

inline Floats clamped_swiglu(Floats gate, Floats up) {
    // In this order NaN comes through on every instruction set.
    const Floats limited = minimum(broadcast(7.0f), gate);
    const Floats within = minimum(broadcast(7.0f), maximum(broadcast(-7.0f), up));
    return multiply(swish(limited, 1.702f), add(within, broadcast(1.0f)));
}

// body(function of two Floats): what `gate` does with a gate and what it gates
template <typename Body>
loraplex_status for_gate(loraplex_activation activation, const Body &body) {
    if (activation == LORAPLEX_CLAMPED_SWIGLU) {
        body([](Floats gate, Floats up) { return clamped_swiglu(gate, up); });
        return LORAPLEX_OK;
    }
    return for_activation(activation, [&](const auto &function) {
        body([&](Floats gate, Floats up) { return multiply(function(gate), up); });
    });
}

// output [num_rows, n], contiguous: the function of each element of x
template <typename T, typename Function>
void map(loraplex_pool &pool, std::int64_t num_rows, std::int64_t n, const void *x,
         std::int64_t x_stride, void *output, const Function &function) {
    for_each_row(pool, num_rows, n, [&](std::int64_t row) {
        const T *from = static_cast<const T *>(x) + row * x_stride;
        T *to = static_cast<T *>(output) + row * n;
        for_each_vector(n, [&](std::int64_t first, int count) {
            store_up_to(to + first, function(load_up_to(from + first, count)), count);
        });
    });
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_gate(loraplex_pool *pool, int64_t num_rows, int64_t n,
                              loraplex_dtype dtype, loraplex_activation activation,
                              const void *gate_up, int64_t gate_up_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "gate");
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            return for_gate(activation, [&](const auto &function) {
                for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
                    const T *gate = static_cast<const T *>(gate_up) + row * gate_up_stride;
                    const T *up = gate + n;
                    T *to = static_cast<T *>(output) + row * n;
                    for_each_vector(n, [&](std::int64_t first, int count) {
                        const Floats gated = function(load_up_to(gate + first, count),
                                                      load_up_to(up + first, count));
                        store_up_to(to + first, gated, count);
                    });
                });
            });
        });
    });
}

loraplex_status loraplex_activate(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                  loraplex_dtype dtype, loraplex_activation activation,
                                  const void *x, int64_t x_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "activate");
        return for_dtype(dtype, [&]<typename T>(T) {
            return for_activation(activation, [&](const auto &function) {
                map<T>(*pool, num_rows, n, x, x_stride, output, function);
            });
        });
    });
}

loraplex_status loraplex_xielu(loraplex_pool *pool, int64_t num_rows, int64_t n,
                               loraplex_dtype dtype, float positive, float negative,
                               const void *x, int64_t x_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "xielu");
        return for_dtype(dtype, [&]<typename T>(T) {
            map<T>(*pool, num_rows, n, x, x_stride, output, [&](Floats value) {
                return xielu(value, broadcast(positive), broadcast(negative));
            });
            return LORAPLEX_OK;
        });
    });
}
