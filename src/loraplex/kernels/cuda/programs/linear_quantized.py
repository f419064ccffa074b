"""y = x W^T + bias with the numbers of quantised weights, made floating-point in registers.

The weights are the first operand of the product: only that one may come from registers on every
device. So a tile of sums is [outputs, rows]. Sums are float32 and are scaled group by group.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.linear import tile_of

INPUTS_PER_BLOCK = tl.constexpr(128)
"""Inputs of one step of a sum, at most: 32 words of four nibbles, or 64 of two bytes. Part i of
word j is input i * words + j of the block, so no number moves to another thread. A block has no
more words than a group has inputs, so that all products of a part have one scale."""


@triton.jit
def num_blocks_of(num_inputs, IS_INT4: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Number of blocks of an output."""
    NUM_PARTS: tl.constexpr = 4 if IS_INT4 else 2
    MOST: tl.constexpr = INPUTS_PER_BLOCK // NUM_PARTS
    PART: tl.constexpr = GROUP_SIZE if GROUP_SIZE < MOST else MOST
    return tl.cdiv(num_inputs, PART * NUM_PARTS)


@triton.jit
def byte_of(words, part: tl.constexpr, DTYPE: tl.constexpr):
    """int16 words -> DTYPE -128 .. 127.

    A GPU has few units that convert integers: the bits of a number's last places are made those of
    the byte, and the rest is subtracted.
    """
    moved = words >> (8 * part)
    if tl.bfloat16 == DTYPE:
        # 7 bits are all that it has: 128 + the lower bits, minus 128 or, by the sign, 256.
        lower = ((moved & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
        return lower - ((moved & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
    if tl.float16 == DTYPE:
        return ((moved & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    return ((moved << 8) >> 8).to(DTYPE)


@triton.jit
def nibble_of(words, part: tl.constexpr, DTYPE: tl.constexpr):
    """int16 words -> DTYPE -8 .. 7, likewise."""
    nibbles = (words >> (4 * part)) & 15
    if tl.bfloat16 == DTYPE:
        return (nibbles | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    if tl.float16 == DTYPE:
        return (nibbles | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return nibbles.to(DTYPE) - 8.0


@triton.jit
def entry_of(words, part: tl.constexpr, table, DTYPE: tl.constexpr):
    """int16 words -> DTYPE: what the nibbles stand for in a table [2, 16] int16.

    The table has the bits of float16 and then those of bfloat16: loads need no conversion. It is 32
    bytes of one cache line, so a warp reads it at once.
    """
    nibbles = (words >> (4 * part)) & 15
    if tl.bfloat16 == DTYPE:
        return tl.load(table + 16 + nibbles).to(tl.bfloat16, bitcast=True)
    return tl.load(table + nibbles).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def inputs_of(x_columns, has_row, inputs, num_inputs, EVEN_K: tl.constexpr):
    """x^T of some inputs; zeros, which cost no load, beyond the last row and the last input."""
    inside = has_row[None, :]
    if not EVEN_K:
        inside = inside & (inputs < num_inputs)[:, None]
    return tl.load(x_columns + inputs[:, None], mask=inside, other=0.0)


@triton.jit
def scales_of(scales, group, n, num_outputs):
    """Scales of one group: [outputs, 1]."""
    return tl.load(scales + group * num_outputs + n)[:, None]


@triton.jit
def block_sums(
    sums,
    x_columns,
    has_row,
    weight_rows,
    scales,
    offsets,  # or None
    table,  # or None
    n,
    block,
    num_outputs,
    num_inputs,
    IS_INT4: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """sums + the products of one block of inputs.

    An offset of a group is subtracted times the sum of its inputs, which is float32.
    """
    NUM_PARTS: tl.constexpr = 4 if IS_INT4 else 2
    MOST: tl.constexpr = INPUTS_PER_BLOCK // NUM_PARTS
    PART: tl.constexpr = GROUP_SIZE if GROUP_SIZE < MOST else MOST
    k = tl.arange(0, PART)
    words = tl.load(weight_rows + (k + block * PART)[None, :])
    first = block * (PART * NUM_PARTS)
    partial = tl.zeros_like(sums)
    input_sums = tl.zeros((sums.shape[1],), dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        if table is not None:
            a = entry_of(words, part, table, DTYPE)
        else:
            a = nibble_of(words, part, DTYPE) if IS_INT4 else byte_of(words, part, DTYPE)
        b = inputs_of(x_columns, has_row, k + (first + part * PART), num_inputs, EVEN_K)
        partial = tl.dot(a, b, partial, input_precision="ieee")
        if offsets is not None:
            input_sums += tl.sum(b.to(tl.float32), 0)
        if (part + 1) * PART % GROUP_SIZE == 0 or part == NUM_PARTS - 1:
            group = (first + part * PART) // GROUP_SIZE
            sums += partial * scales_of(scales, group, n, num_outputs)
            partial = tl.zeros_like(sums)
            if offsets is not None:
                sums -= input_sums[None, :] * scales_of(offsets, group, n, num_outputs)
                input_sums = tl.zeros((sums.shape[1],), dtype=tl.float32)
    return sums


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def quantized_linear(
    y,
    x,
    weight,
    scales,
    offsets,  # or None
    table,  # or None
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    y_stride,
    x_stride,
    weight_stride,
    blocks_per_split,
    IS_INT4: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of y per program of axis 0; y [splits, num_rows, num_outputs] with axis 1.

    weight [num_outputs, words] int16, a word of four nibbles or two bytes; scales and offsets
    [groups, num_outputs] float32, one for each GROUP_SIZE inputs of the blocks. Nibbles have a
    table [2, 16], or stand for themselves.
    """
    num_tiles_m, num_tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
    tile_m, tile_n = tile_of(tl.program_id(0), num_tiles_m, num_tiles_n, GROUP_M)
    split = tl.program_id(1)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies beyond the last output is computed from its weights, and not stored.
    outputs = tl.minimum(n, num_outputs - 1)
    x_columns = x + m.to(tl.int64)[None, :] * x_stride
    weight_rows = weight + outputs.to(tl.int64)[:, None] * weight_stride
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, num_blocks_of(num_inputs, IS_INT4, GROUP_SIZE))
    for block in range(first, last):
        sums = block_sums(
            *(sums, x_columns, m < num_rows, weight_rows, scales, offsets, table, outputs, block),
            *(num_outputs, num_inputs),
            *(IS_INT4, GROUP_SIZE, EVEN_K, x.dtype.element_ty),
        )
    if HAS_BIAS:
        sums += tl.load(bias + outputs).to(tl.float32)[:, None]
    rows = split.to(tl.int64) * num_rows + m
    places = y + rows[None, :] * y_stride + n[:, None]
    inside = (m < num_rows)[None, :] & (n < num_outputs)[:, None]
    tl.store(places, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(
    y,
    splits,
    bias,
    num_rows,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y [num_rows, num_outputs] = splits [NUM_SPLITS, num_rows, num_outputs], added in order."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < num_outputs
    sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        first = (row + split * num_rows).to(tl.int64) * num_outputs
        sums += tl.load(splits + first + n, mask=inside, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    places = y + row.to(tl.int64) * num_outputs + n
    tl.store(places, sums.to(y.dtype.element_ty), mask=inside)
