"""Scaled sums, scaled numbers, and the soft cap."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh of float32 numbers to their last bits: near zero by its series, where 1 - e loses them.

    (The library function of a GPU has no interpreter.)
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 - square * (17 / 315)))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.04, series, tl.where(x < 0, -far, far))


@triton.jit
def add(
    output,
    x,
    residual,
    x_stride,
    residual_stride,
    factor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [rows, SIZE] = residual + factor * x, rounded once. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    added = tl.load(x + row * x_stride + columns, mask=inside)
    total = tl.load(residual + row * residual_stride + columns, mask=inside).to(tl.float32)
    total += added.to(tl.float32) * factor
    tl.store(output + row * SIZE + columns, total.to(added.dtype), mask=inside)


@triton.jit
def scale(
    x,
    row_stride,
    factor,
    soft_cap,
    HAS_SOFT_CAP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [rows, SIZE] = soft_cap * tanh(factor * x / soft_cap), in place. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = x + row * row_stride + columns
    narrow = tl.load(places, mask=inside)
    wide = narrow.to(tl.float32) * factor
    if HAS_SOFT_CAP:
        wide = soft_cap * tanh(wide / soft_cap)
    tl.store(places, wide.to(narrow.dtype), mask=inside)
