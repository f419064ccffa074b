"""Activations of feed-forward layers, alone and as gates."""

import triton
import triton.language as tl


@triton.jit
def _activated(wide, ACTIVATION: tl.constexpr):
    """The activation, one of kernels.activations by value, of float32 numbers."""
    if ACTIVATION == "silu":
        result = wide / (1.0 + tl.exp(-wide))
    elif ACTIVATION == "gelu":
        result = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # x (1 + tanh u) / 2 = x / (1 + e^(-2 u))
        result = wide / (1.0 + tl.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))
    else:
        result = tl.maximum(wide, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "squared_relu":
            result = result * result
        else:
            tl.static_assert(ACTIVATION == "relu")
    return result


@triton.jit
def _clamped_swiglu(wide, up):
    """(up + 1) wide sigmoid(1.702 wide) of float32 numbers; wide at most 7, up within 7."""
    every: tl.constexpr = tl.PropagateNan.ALL
    wide = tl.minimum(wide, 7.0, propagate_nan=every)
    up = tl.maximum(tl.minimum(up, 7.0, propagate_nan=every), -7.0, propagate_nan=every)
    return (up + 1.0) * wide / (1.0 + tl.exp(-1.702 * wide))


@triton.jit
def gate(
    output, gate_up, row_stride, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """output [rows, SIZE] = activation(gate_up[:, :SIZE]) * gate_up[:, SIZE:]. Grid: (rows, parts).

    Rounded twice, as the reference does it, but for CLAMPED_SWIGLU. The product of two narrow
    numbers is exact in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = gate_up + row * row_stride + columns
    first, up = tl.load(places, mask=inside), tl.load(places + SIZE, mask=inside)
    if ACTIVATION == "clamped_swiglu":
        product = _clamped_swiglu(first.to(tl.float32), up.to(tl.float32)).to(first.dtype)
    else:
        activated = _activated(first.to(tl.float32), ACTIVATION).to(first.dtype)
        product = (activated.to(tl.float32) * up.to(tl.float32)).to(first.dtype)
    tl.store(output + row * SIZE + columns, product, mask=inside)


@triton.jit
def activate(
    output, x, row_stride, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """output [rows, SIZE] of x [rows, SIZE]. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    narrow = tl.load(x + row * row_stride + columns, mask=inside)
    activated = _activated(narrow.to(tl.float32), ACTIVATION)
    tl.store(output + row * SIZE + columns, activated.to(narrow.dtype), mask=inside)
