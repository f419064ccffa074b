"""The gate of an MLP, and the activations of one without."""

import triton
import triton.language as tl


@triton.jit
def silu_mul(output, gate_up, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """output [rows, SIZE] = silu(gate_up[:, :SIZE]) * gate_up[:, SIZE:]. Grid: (rows, parts).

    Rounded twice, as the reference does it. The product of two narrow numbers is exact in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = gate_up + row * row_stride + columns
    gate, up = tl.load(places, mask=inside), tl.load(places + SIZE, mask=inside)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(output + row * SIZE + columns, product, mask=inside)


@triton.jit
def activate(
    output, x, row_stride, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """output [rows, SIZE] of x [rows, SIZE]; kernels.activations by value. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    narrow = tl.load(x + row * row_stride + columns, mask=inside)
    wide = narrow.to(tl.float32)
    if ACTIVATION == "gelu":
        wide = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # x (1 + tanh u) / 2 = x / (1 + e^(-2 u))
        wide = wide / (1.0 + tl.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        wide = tl.maximum(wide, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(output + row * SIZE + columns, wide.to(narrow.dtype), mask=inside)
