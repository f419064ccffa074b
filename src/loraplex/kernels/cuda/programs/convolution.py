"""Causal convolution of each channel over the positions of a sequence."""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.elementwise import activated


@triton.jit
def store_inputs(stored, x, places, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """stored [positions, SIZE] float32 gets x [tokens, SIZE] at places; -1: nowhere.

    Grid: (tokens, parts).
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + token)
    inside = (columns < SIZE) & (place >= 0)
    values = tl.load(x + token * row_stride + columns, mask=inside)
    tl.store(stored + place * SIZE + columns, values.to(tl.float32), mask=inside)


@triton.jit
def _row_of(token, query_start_loc, num_rows, ROWS: tl.constexpr):
    """The last row that begins at the token or before it; padding has the last of all."""
    row = 0
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        firsts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=token + 1)
        row += tl.sum((firsts <= token).to(tl.int32), 0)
    return row - 1


@triton.jit(do_not_specialize=["num_rows"])
def causal_conv(
    output,
    x,
    stored,  # [blocks, BLOCK_SIZE, SIZE], with the inputs of this step
    weight,
    bias,  # or None
    query_start_loc,
    positions,
    table_starts,
    tables,
    num_rows,
    row_stride,
    channel_stride,
    tap_stride,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # or None
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [tokens, SIZE] of x [tokens, SIZE]. Grid: (tokens, parts)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    row = _row_of(token, query_start_loc, num_rows, ROWS)
    first = tl.load(query_start_loc + row)
    last = tl.load(positions + token)
    table = tables + tl.load(table_starts + row)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source, position = token - (TAPS - 1 - tap), last - (TAPS - 1 - tap)
        is_given = (source >= first) & (position >= 0)
        is_stored = (source < first) & (position >= 0)
        given = tl.load(x + source * row_stride + columns, mask=inside & is_given, other=0.0)
        block = tl.load(table + position // BLOCK_SIZE, mask=is_stored, other=0).to(tl.int64)
        place = block * BLOCK_SIZE + position % BLOCK_SIZE
        earlier = tl.load(stored + place * SIZE + columns, mask=inside & is_stored, other=0.0)
        taps = weight + columns * channel_stride + tap * tap_stride
        total += tl.load(taps, mask=inside, other=0.0) * (given.to(tl.float32) + earlier)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    if ACTIVATION is not None:
        total = activated(total, ACTIVATION)
    tl.store(output + token * SIZE + columns, total.to(output.dtype.element_ty), mask=inside)
