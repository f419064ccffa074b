// Where the elements of a packed weight lie.
//
// The outputs (rows of the weight) are cut into panels of kPanelWidth. In a panel the inputs follow
// one another, and for each input the panel's outputs: a kernel reads it front to back. A kernel
// takes up to kPanelMultiple panels at once, so there are zeros up to that multiple. In bfloat16,
// two inputs are interleaved for each output (w[o][i], w[o][i + 1]), so that a shift and a mask
// widen them; an odd last input has a 0 beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loraplex/dtype.h"
#include "loraplex/linear.h"

namespace loraplex {

inline constexpr std::int64_t kPanelWidth = 16;
inline constexpr std::int64_t kPanelMultiple = 8;

template <typename W>
inline constexpr std::int64_t kInterleaved = 1;
template <>
inline constexpr std::int64_t kInterleaved<Bfloat16> = 2;

// Elements of one panel.
template <typename W>
constexpr std::int64_t panel_size(std::int64_t in_features) {
    return (in_features + kInterleaved<W> - 1) / kInterleaved<W> * kInterleaved<W> * kPanelWidth;
}

// With those that hold nothing.
constexpr std::int64_t num_panels(std::int64_t out_features) {
    constexpr std::int64_t kOutputs = kPanelWidth * kPanelMultiple;
    return (out_features + kOutputs - 1) / kOutputs * kPanelMultiple;
}

// body(W{}) with the element type of a kind; what it returns.
template <typename Body>
loraplex_status for_weight_kind(loraplex_weight_kind kind, const Body &body) {
    switch (kind) {
        case LORAPLEX_WEIGHT_FLOAT32:
            return body(float{});
        case LORAPLEX_WEIGHT_BFLOAT16:
            return body(Bfloat16{});
        case LORAPLEX_WEIGHT_FLOAT16:
            return body(Float16{});
        default:
            return LORAPLEX_INVALID_ARGUMENT;
    }
}

}  // namespace loraplex
