"""Activations as float8, with a scale for each row."""

import triton
import triton.language as tl


@triton.jit
def quantize_rows(
    rows,
    row_scales,
    x,
    x_stride,
    num_inputs,
    MOST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x -> rows float8, both [num rows, num_inputs], and row_scales [num rows] float32.

    One program per row. A row below SMALLEST counts as zeros; the scale of one that is not finite
    is NaN.
    """
    row = tl.program_id(0)
    x += row.to(tl.int64) * x_stride
    rows += row.to(tl.int64) * num_inputs
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, num_inputs, BLOCK):
        wide = tl.load(x + first + k, mask=first + k < num_inputs, other=0.0).to(tl.float32)
        # A maximum passes over NaN.
        magnitude = tl.where(wide == wide, tl.abs(wide), float("inf"))
        largest = tl.maximum(largest, magnitude)
    most = tl.max(largest, 0)
    is_finite = most < float("inf")
    counts = is_finite & (most >= SMALLEST)
    factor = tl.where(counts, tl.div_rn(MOST, tl.where(counts, most, 1.0)), 0.0)
    scale = tl.where(counts, tl.div_rn(most, MOST), tl.where(is_finite, 0.0, float("nan")))
    tl.store(row_scales + row, scale)
    for first in range(0, num_inputs, BLOCK):
        inside = first + k < num_inputs
        wide = tl.load(x + first + k, mask=inside, other=0.0).to(tl.float32)
        numbers = tl.where(is_finite, wide, 0.0) * factor
        numbers = tl.minimum(tl.maximum(numbers, -MOST), MOST)
        tl.store(rows + first + k, numbers.to(rows.dtype.element_ty), mask=inside)
