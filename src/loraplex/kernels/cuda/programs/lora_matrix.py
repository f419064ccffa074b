"""Multi-LoRA for pieces of many tokens, by matrix units. Terms are those of programs.lora.

How many splits there are differs from step to step: no kernel is compiled anew for that.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.lora import outputs_of_tile, piece_at, place_of
from loraplex.kernels.cuda.programs.modules import pick


@triton.jit
def multiplied(reduced, matrix):
    """reduced [BLOCK_T, BLOCK_R] float32 x matrix [BLOCK_R, BLOCK_N] of 16 bits, float32.

    A row is divided by its largest magnitude, so that the range of 16 bits does not matter, and
    multiplied as the sum of two such numbers, so that nothing of it is lost that counts.
    """
    largest = tl.max(tl.abs(reduced), axis=1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    scaled = reduced / largest[:, None]
    high = scaled.to(matrix.dtype)
    low = (scaled - high.to(tl.float32)).to(matrix.dtype)
    return tl.dot(low, matrix, tl.dot(high, matrix)) * largest[:, None]


@triton.jit
def shrink_tile(
    partials,  # [BLOCK_T, 1]: of each row, this module and split
    lines,  # [BLOCK_T, 1]: the rows' inputs
    is_row,
    a,
    rank,
    split,
    num_blocks,
    C,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One split of the inputs of some rows times all ranks of a matrix A."""
    first_input = split * num_blocks * BLOCK_K
    for first_rank in range(0, rank, BLOCK_R):
        rows = first_rank + tl.arange(0, BLOCK_R)
        is_rank = rows < rank
        sums = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for first in range(first_input, min(first_input + num_blocks * BLOCK_K, C.IN), BLOCK_K):
            inputs = first + tl.arange(0, BLOCK_K)
            is_input = inputs < C.IN
            values = tl.load(
                lines + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            matrix = tl.load(
                a + rows[None, :] * C.IN + inputs[:, None],
                mask=is_rank[None, :] & is_input[:, None],
                other=0.0,
            )
            sums = tl.dot(values, matrix, sums)
        tl.store(partials + rows[None, :], sums, mask=is_row[:, None])


@triton.jit
def expand_tile(
    y_rows,  # [BLOCK_T, 1]: the outputs
    partials,  # [BLOCK_T, 1]: of each row and this module, all splits
    is_row,
    b,
    rank,
    scales,  # of the rows
    outputs,
    out_features,
    num_splits,
    C,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add the splits of some rows times some columns of a matrix B to the outputs."""
    is_output = outputs < out_features
    sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        rows = first_rank + tl.arange(0, BLOCK_R)
        matrix = tl.load(
            b + rows[:, None] * out_features + outputs[None, :],
            mask=(rows < rank)[:, None] & is_output[None, :],
            other=0.0,
        )
        reduced = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for split in range(num_splits):
            reduced += tl.load(
                partials + split * C.MAX_RANK + rows[None, :],
                mask=is_row[:, None],
                other=0.0,
            )
        sums += multiplied(reduced * scales[:, None], matrix)
    places = y_rows + outputs[None, :]
    mask = is_row[:, None] & is_output[None, :]
    before = tl.load(places, mask=mask, other=0.0)
    after = (before.to(tl.float32) + sums).to(y_rows.dtype.element_ty)
    tl.store(places, after, mask=mask)


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry", "num_splits", "num_blocks"])
def shrink_many(
    x,  # [T, IN]
    partials,
    pool,
    cells,
    pieces,
    stride_x,
    cells_of_entry,
    first_cell,
    num_splits,
    num_blocks,  # of a split, BLOCK_K inputs each
    C,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: one split of the inputs, all ranks of one module, one piece."""
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    split = program % num_splits
    module = program // num_splits % NUM_MODULES
    piece = program // (num_splits * NUM_MODULES)
    entry, start, count = piece_at(pieces, piece)
    if entry < 0:
        return
    cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    rank = tl.load(cells.ranks + cell)
    a = pool + place_of(cells, cell, C)
    slots = start + tl.arange(0, BLOCK_T)
    is_token = slots < start + count
    tokens = tl.load(pieces.token_indices + slots, mask=is_token, other=0).to(tl.int64)
    lines = x + tokens[:, None] * stride_x
    places = (slots.to(tl.int64) * NUM_MODULES + module) * num_splits + split
    shrink_tile(
        *(partials + places[:, None] * C.MAX_RANK, lines, is_token, a, rank, split, num_blocks, C),
        *(BLOCK_T, BLOCK_K, BLOCK_R),
    )


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry", "first_piece", "num_splits"])
def expand_many(
    y,  # [T, any]
    partials,
    pool,
    cells,
    pieces,
    stride_y,
    cells_of_entry,
    first_cell,
    first_piece,
    num_splits,
    C,
    COLUMNS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: BLOCK_N outputs of one module, one piece."""
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    piece = first_piece + program // NUM_TILES
    entry, start, count = piece_at(pieces, piece)
    if entry < 0:
        return
    module, outputs, out_features, first_output = outputs_of_tile(
        *(program % NUM_TILES, OUT_FEATURES, OUT_OFFSETS, C, BLOCK_N)
    )
    cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    rank = tl.load(cells.ranks + cell)
    if rank == 0:
        return
    b = pool + place_of(cells, cell, C) + rank * C.IN
    slots = start + tl.arange(0, BLOCK_T)
    is_token = slots < start + count
    tokens = tl.load(pieces.token_indices + slots, mask=is_token, other=0).to(tl.int64)
    token_scales = tl.load(pieces.token_scales + slots, mask=is_token, other=0.0) * tl.load(
        cells.scales + cell
    )
    first_partials = (slots.to(tl.int64) * NUM_MODULES + module) * num_splits * C.MAX_RANK
    y_rows = y + tokens[:, None] * stride_y + first_output
    expand_tile(
        *(y_rows, partials + first_partials[:, None], is_token, b, rank, token_scales),
        *(outputs, out_features, num_splits, C, BLOCK_T, BLOCK_N, BLOCK_R),
    )
