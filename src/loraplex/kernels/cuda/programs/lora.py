"""Multi-LoRA for pieces of few tokens: each matrix is read once, and that is what takes time.

A table cell is (entry, layer, module). Modules are numbered within a call; COLUMNS has their places
in the table. A slot is a place in token_indices; the partial sums of x A^T lie at
[slot, module of the call, split, rank], float32. Behind an adapter's ranks they are zero up to a
multiple of BLOCK_R, so that whoever reads them needs no mask.
"""

import triton
import triton.language as tl


@triton.jit
def pick(number, VALUES: tl.constexpr):
    """VALUES[number], for a number that is known at run time only."""
    value = tl.full((), VALUES[0], tl.int32)
    for index in tl.static_range(1, len(VALUES)):
        value = tl.where(number == index, VALUES[index], value)
    return value


@triton.jit
def module_of_tile(tile, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """(module, tile within it) of a tile among those of all modules, BLOCK columns each."""
    module = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    end = 0
    for index in tl.static_range(1, len(SIZES)):
        end += (SIZES[index - 1] + BLOCK - 1) // BLOCK
        module = tl.where(tile >= end, index, module)
        first = tl.where(tile >= end, end, first)
    return module, tile - first


@triton.jit
def place_of(offsets, cell, IS_ALIGNED: tl.constexpr):
    """Where a cell's A begins in the pool."""
    offset = tl.load(offsets + cell)
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry"])
def shrink_few(
    x,  # [T, IN]
    partials,
    pool,
    offsets,
    ranks,
    entries,  # [pieces of all waves]
    starts,
    counts,
    token_indices,
    stride_x,
    cells_of_entry,
    first_cell,  # of the layer, within an entry
    COLUMNS: tl.constexpr,
    IN: tl.constexpr,
    MAX_RANK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # of a split
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: one split of the inputs, all ranks of one module, one piece."""
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    split = program % NUM_SPLITS
    module = program // NUM_SPLITS % NUM_MODULES
    piece = program // (NUM_SPLITS * NUM_MODULES)
    entry = tl.maximum(tl.load(entries + piece), 0)
    start = tl.load(starts + piece)
    count = tl.load(counts + piece)  # 0 of an empty piece
    cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    rank = tl.load(ranks + cell)
    a = pool + place_of(offsets, cell, IS_ALIGNED)
    for step in range(count):
        slot = start + step
        line = x + tl.load(token_indices + slot).to(tl.int64) * stride_x
        place = (slot.to(tl.int64) * NUM_MODULES + module) * NUM_SPLITS + split
        for first_rank in range(0, rank, BLOCK_R):
            rows = first_rank + tl.arange(0, BLOCK_R)
            sums = tl.zeros((BLOCK_R,), tl.float32)
            for block in tl.static_range(NUM_BLOCKS):
                inputs = (split * NUM_BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
                is_input = inputs < IN
                values = tl.load(line + inputs, mask=is_input, other=0.0).to(tl.float32)
                mask = (rows < rank)[:, None] & is_input[None, :]
                matrix = tl.load(a + rows[:, None] * IN + inputs[None, :], mask=mask, other=0.0)
                sums += tl.sum(matrix.to(tl.float32) * values[None, :], axis=1)
            tl.store(partials + place * MAX_RANK + rows, sums)


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry", "first_piece"])
def expand_few(
    y,  # [T, any]
    partials,
    pool,
    offsets,
    ranks,
    scales,
    entries,
    starts,
    counts,
    token_indices,
    token_scales,
    stride_y,
    cells_of_entry,
    first_cell,
    first_piece,  # of the wave
    COLUMNS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    IN: tl.constexpr,
    MAX_RANK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # NUM_SPLITS, rounded up to a power of two
    NUM_TILES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: BLOCK_N outputs of one module, one piece."""
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    piece = first_piece + program // NUM_TILES
    entry = tl.maximum(tl.load(entries + piece), 0)
    start = tl.load(starts + piece)
    count = tl.load(counts + piece)  # 0 of an empty piece
    module, tile = module_of_tile(program % NUM_TILES, OUT_FEATURES, BLOCK_N)
    cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    rank = tl.load(ranks + cell)
    scale = tl.load(scales + cell)
    out_features = pick(module, OUT_FEATURES)
    first_output = pick(module, OUT_OFFSETS)
    if IS_ALIGNED:
        out_features = tl.multiple_of(out_features, 16)
        first_output = tl.multiple_of(first_output, 16)
    b = pool + place_of(offsets, cell, IS_ALIGNED) + rank * IN
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    splits = tl.arange(0, SPLITS)
    for step in range(count):
        slot = start + step
        token = tl.load(token_indices + slot).to(tl.int64)
        token_scale = scale * tl.load(token_scales + slot)
        row = y + token * stride_y + first_output + outputs
        before = tl.load(row, mask=outputs < out_features, other=0.0)
        partial = partials + (slot.to(tl.int64) * NUM_MODULES + module) * NUM_SPLITS * MAX_RANK
        sums = tl.zeros((BLOCK_N,), tl.float32)
        for first_rank in range(0, rank, BLOCK_R):
            rows = first_rank + tl.arange(0, BLOCK_R)
            mask = (rows < rank)[:, None] & (outputs < out_features)[None, :]
            matrix = tl.load(b + rows[:, None] * out_features + outputs[None, :], mask, other=0.0)
            parts = tl.load(
                partial + splits[:, None] * MAX_RANK + rows[None, :],
                mask=(splits < NUM_SPLITS)[:, None],
                other=0.0,
            )
            reduced = tl.sum(parts, axis=0) * token_scale
            sums += tl.sum(reduced[:, None] * matrix.to(tl.float32), axis=0)
        after = (before.to(tl.float32) + sums).to(y.dtype.element_ty)
        tl.store(row, after, mask=outputs < out_features)
