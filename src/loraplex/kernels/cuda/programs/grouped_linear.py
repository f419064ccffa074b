"""Products of rows with the weights of their experts.

A tile is some rows of one expert: which ones follows from `starts`, which the program reads, so
that the grid is the same for all routes. weight [E * num_outputs, ...] and what belongs to its
outputs have one expert after another. Pair p reads row p // DIVISOR of x and writes row p of y.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.linear import tile_of, tile_sums
from loraplex.kernels.cuda.programs.linear_quantized import block_sums, num_blocks_of


@triton.jit
def rows_of_tile(
    starts, tile, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(expert, first of its places in `pairs`, their end): no places beyond the last tile."""
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < NUM_EXPERTS
    firsts = tl.load(starts + experts, mask=is_expert, other=0)
    ends = tl.load(starts + 1 + experts, mask=is_expert, other=0)
    num_tiles = (ends - firsts + (BLOCK_M - 1)) // BLOCK_M
    last_tiles = tl.cumsum(num_tiles, 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    is_own = experts == expert
    places = firsts + (tile - last_tiles + num_tiles) * BLOCK_M
    return expert, tl.sum(tl.where(is_own, places, 0), 0), tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_linear(
    y,
    x,
    weight,
    bias,  # [E * num_outputs], or None
    row_scales,  # of the rows of x, or None
    scales,  # [E * num_outputs], or None
    pairs,
    starts,
    num_tiles,  # of rows, at most
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    NUM_EXPERTS: tl.constexpr,
    DIVISOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of y [pairs, num_outputs] per program. With scales, factors are float8."""
    IS_FLOAT8: tl.constexpr = row_scales is not None
    num_tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    tile_m, tile_n = tile_of(tl.program_id(0), num_tiles, num_tiles_n, GROUP_M)
    expert, first, end = rows_of_tile(starts, tile_m, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies beyond the ends is computed from the last row, and not stored.
    pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
    outputs = expert.to(tl.int64) * num_outputs + tl.minimum(n, num_outputs - 1)
    x_rows = x + (pair // DIVISOR)[:, None] * x_stride
    columns = weight + outputs[None, :] * weight_stride
    sums = tile_sums(
        *(x_rows, columns, num_inputs, IS_FLOAT8, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K),
    )
    if IS_FLOAT8:
        sums *= tl.load(row_scales + pair // DIVISOR)[:, None]
        sums *= tl.load(scales + outputs)[None, :]
    if bias is not None:
        sums += tl.load(bias + outputs).to(tl.float32)[None, :]
    places = y + pair[:, None] * num_outputs + n[None, :]
    inside = (m < end)[:, None] & (n < num_outputs)[None, :]
    tl.store(places, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_quantized_linear(
    y,
    x,
    weight,
    bias,  # [E * num_outputs], or None
    scales,  # [groups, E * num_outputs]
    offsets,  # likewise, or None
    table,  # or None
    pairs,
    starts,
    num_tiles,  # of rows, at most
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    IS_INT4: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    DIVISOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of y [pairs, num_outputs] per program; weights as in programs.linear_quantized."""
    num_tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    tile_m, tile_n = tile_of(tl.program_id(0), num_tiles, num_tiles_n, GROUP_M)
    expert, first, end = rows_of_tile(starts, tile_m, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
    # What lies beyond the last output is computed from its weights, and not stored.
    outputs = expert.to(tl.int64) * num_outputs + tl.minimum(n, num_outputs - 1)
    x_columns = x + (pair // DIVISOR)[None, :] * x_stride
    weight_rows = weight + outputs[:, None] * weight_stride
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(num_blocks_of(num_inputs, IS_INT4, GROUP_SIZE)):
        sums = block_sums(
            *(sums, x_columns, m < end, weight_rows, scales, offsets, table, outputs, block),
            *(num_outputs * NUM_EXPERTS, num_inputs),
            *(IS_INT4, GROUP_SIZE, EVEN_K, x.dtype.element_ty),
        )
    if bias is not None:
        sums += tl.load(bias + outputs).to(tl.float32)[:, None]
    places = y + pair[None, :] * num_outputs + n[:, None]
    inside = (m < end)[None, :] & (n < num_outputs)[:, None]
    tl.store(places, sums.to(y.dtype.element_ty), mask=inside)
