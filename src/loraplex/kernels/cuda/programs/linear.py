"""y = x W^T + bias in tiles that do not depend on the number of rows.

Also activations as float8, with a scale for each row, and sums of the shares of ranks, in an order
that depends on nothing but their number.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(program, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """(tile of rows, tile of outputs): programs that run together share weights in the L2 cache."""
    per_group = GROUP_M * num_tiles_n
    first_m = (program // per_group) * GROUP_M
    size = tl.minimum(num_tiles_m - first_m, GROUP_M)
    return first_m + (program % per_group) % size, (program % per_group) // size


@triton.jit
def tile_sums(
    x_rows,
    columns,
    num_inputs,
    IS_FLOAT8: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x_rows [BLOCK_M, 1] times columns [1, BLOCK_N] of the weight, both pointers; float32.

    Factors of float8 become float16, which is exact.
    """
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        inputs = first + k
        if EVEN_K:
            a = tl.load(x_rows + inputs[None, :])
            b = tl.load(columns + inputs[:, None])
        else:
            a = tl.load(x_rows + inputs[None, :], mask=inputs[None, :] < num_inputs, other=0.0)
            b = tl.load(columns + inputs[:, None], mask=inputs[:, None] < num_inputs, other=0.0)
        if IS_FLOAT8:
            a, b = a.to(tl.float16), b.to(tl.float16)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def invariant_linear(
    y,
    x,
    weight,
    bias,
    row_scales,
    scales,
    num_rows,
    num_outputs,
    num_inputs,
    y_stride,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of y [num_rows, num_outputs] per program; x [num_rows, num_inputs].

    Sums of float8 are times row_scales [num_rows] and scales [num_outputs].
    """
    num_tiles_m, num_tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
    tile_m, tile_n = tile_of(tl.program_id(0), num_tiles_m, num_tiles_n, GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies beyond the ends is computed from the last row, and not stored.
    x_rows = x + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * x_stride
    columns = weight + tl.minimum(n, num_outputs - 1).to(tl.int64)[None, :] * weight_stride
    sums = tile_sums(
        *(x_rows, columns, num_inputs, IS_FLOAT8, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K),
    )
    if IS_FLOAT8:
        sums *= tl.load(row_scales + m, mask=m < num_rows, other=0.0)[:, None]
        sums *= tl.load(scales + n, mask=n < num_outputs, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    places = y + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    inside = (m < num_rows)[:, None] & (n < num_outputs)[None, :]
    tl.store(places, sums.to(y.dtype.element_ty), mask=inside)


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


@triton.jit
def share_of(places, share: tl.constexpr, share_stride, inside):
    return tl.load(places + share * share_stride, mask=inside, other=0.0)


@triton.jit
def add_shares(
    y,
    shares,
    bias,
    num_columns,
    share_stride,
    row_stride,
    y_stride,
    NUM_SHARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [rows, num_columns] = bias + the sum of shares [NUM_SHARES, rows, num_columns].

    Four shares at a time: (s0 + s1) + (s2 + s3); up to 8 that is kernels.channel.tree_sum's order.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_columns
    places = shares + row * row_stride + n
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.static_range(0, NUM_SHARES, 4):
        four = share_of(places, first, share_stride, inside)
        if first + 1 < NUM_SHARES:
            four += share_of(places, first + 1, share_stride, inside)
        if first + 2 < NUM_SHARES:
            last = share_of(places, first + 2, share_stride, inside)
            if first + 3 < NUM_SHARES:
                last += share_of(places, first + 3, share_stride, inside)
            four += last
        sums = four if first == 0 else sums + four
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + n, sums.to(y.dtype.element_ty), mask=inside)
