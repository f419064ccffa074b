"""Multi-LoRA for pieces of few tokens: each matrix is read once, and that is what takes time.

A table cell is (entry, layer, module). Modules are numbered within a call; COLUMNS has their places
in the table. A slot is a place in token_indices; the partial sums of x A^T lie at
[slot, module of the call, split, rank], float32. After an adapter's ranks they are zero up to a
multiple of BLOCK_R, so that reading them needs no mask.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.lora_vectors import with_vectors
from loraplex.kernels.cuda.programs.modules import module_of_tile, pick


class Cells(NamedTuple):
    """The LoRA table on the device, per cell."""

    offsets: Any
    """Where A begins in the pool; B follows it."""
    ranks: Any
    scales: Any
    vectors: Any
    """MAX_VECTORS words each: see kernels.adapter_parts."""


class Pieces(NamedTuple):
    """Tokens of one adapter that a program computes together."""

    entries: Any
    """Per piece: the table entry of its adapter; -1: the piece is empty."""
    starts: Any
    """Per piece: its first slot."""
    counts: Any
    """Per piece: its number of tokens; 0: it is empty."""
    token_indices: Any
    token_scales: Any


class LoraConstants(NamedTuple):
    """Constants of a fused linear layer; each is a tl.constexpr."""

    IN: Any
    """Number of inputs."""
    MAX_RANK: Any
    """Ranks that the partial sums of a split have space for."""
    IS_ALIGNED: Any
    """Whether all offsets and sizes are multiples of 16."""


@triton.jit
def place_of(cells, cell, C):
    """Offset of a cell's A in the pool."""
    offset = tl.load(cells.offsets + cell)
    if C.IS_ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def piece_at(pieces, piece):
    """Entry of a piece's adapter (-1: the piece is empty), its first slot, its number of tokens."""
    entry = tl.load(pieces.entries + piece)
    return entry, tl.load(pieces.starts + piece), tl.load(pieces.counts + piece)


@triton.jit
def outputs_of_tile(tile, SIZES: tl.constexpr, OFFSETS: tl.constexpr, C, BLOCK_N: tl.constexpr):
    """(module, outputs of the tile, number of the module's outputs, the first of them in y)."""
    module, tile_of_module = module_of_tile(tile, SIZES, BLOCK_N)
    out_features = pick(module, SIZES)
    first_output = pick(module, OFFSETS)
    if C.IS_ALIGNED:
        out_features = tl.multiple_of(out_features, 16)
        first_output = tl.multiple_of(first_output, 16)
    outputs = tile_of_module * BLOCK_N + tl.arange(0, BLOCK_N)
    return module, outputs, out_features, first_output


@triton.jit
def shrink_line(
    partial,  # of this row, module and split
    line,  # the row's inputs
    a,
    rank,
    split,
    C,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One split of the inputs of one row times all ranks of a matrix A."""
    for first_rank in range(0, rank, BLOCK_R):
        rows = first_rank + tl.arange(0, BLOCK_R)
        sums = tl.zeros((BLOCK_R,), tl.float32)
        for block in tl.static_range(NUM_BLOCKS):
            inputs = (split * NUM_BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
            is_input = inputs < C.IN
            values = tl.load(line + inputs, mask=is_input, other=0.0).to(tl.float32)
            mask = (rows < rank)[:, None] & is_input[None, :]
            matrix = tl.load(a + rows[:, None] * C.IN + inputs[None, :], mask=mask, other=0.0)
            sums += tl.sum(matrix.to(tl.float32) * values[None, :], axis=1)
        tl.store(partial + rows, sums)


@triton.jit
def expand_line(
    row,  # the outputs
    before,  # them, float32
    partial,  # of this row and module, all splits
    b,
    rank,
    scale,
    outputs,
    out_features,
    C,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add the splits of one row times some columns of a matrix B to the outputs before it."""
    splits = tl.arange(0, SPLITS)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        rows = first_rank + tl.arange(0, BLOCK_R)
        mask = (rows < rank)[:, None] & (outputs < out_features)[None, :]
        matrix = tl.load(b + rows[:, None] * out_features + outputs[None, :], mask, other=0.0)
        parts = tl.load(
            partial + splits[:, None] * C.MAX_RANK + rows[None, :],
            mask=(splits < NUM_SPLITS)[:, None],
            other=0.0,
        )
        reduced = tl.sum(parts, axis=0) * scale
        sums += tl.sum(reduced[:, None] * matrix.to(tl.float32), axis=0)
    after = (before + sums).to(row.dtype.element_ty)
    tl.store(row + outputs, after, mask=outputs < out_features)


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry"])
def shrink_few(
    x,  # [T, IN]
    partials,
    pool,
    cells,
    pieces,
    stride_x,
    cells_of_entry,
    first_cell,  # of the layer, within an entry
    C,
    COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
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
    entry, start, count = piece_at(pieces, piece)
    entry = tl.maximum(entry, 0)  # an empty piece has no tokens
    cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    rank = tl.load(cells.ranks + cell)
    a = pool + place_of(cells, cell, C)
    for step in range(count):
        slot = start + step
        line = x + tl.load(pieces.token_indices + slot).to(tl.int64) * stride_x
        place = (slot.to(tl.int64) * NUM_MODULES + module) * NUM_SPLITS + split
        partial = partials + place * C.MAX_RANK
        shrink_line(partial, line, a, rank, split, C, NUM_BLOCKS, BLOCK_K, BLOCK_R)


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry", "first_piece"])
def expand_few(
    y,  # [T, any]
    partials,
    pool,
    cells,
    pieces,
    stride_y,
    cells_of_entry,
    first_cell,
    first_piece,  # of the wave
    C,
    COLUMNS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # NUM_SPLITS, rounded up to a power of two
    NUM_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_VECTORS: tl.constexpr,
    UNIT: tl.constexpr,  # elements in which cells.vectors counts
):
    """One program: BLOCK_N outputs of one module, one piece.

    HAS_VECTORS: the outputs are the base's own, which the adapter's vectors change first.
    """
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    piece = first_piece + program // NUM_TILES
    entry, start, count = piece_at(pieces, piece)
    entry = tl.maximum(entry, 0)  # an empty piece has no tokens
    module, outputs, out_features, first_output = outputs_of_tile(
        *(program % NUM_TILES, OUT_FEATURES, OUT_OFFSETS, C, BLOCK_N)
    )
    cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    rank = tl.load(cells.ranks + cell)
    scale = tl.load(cells.scales + cell)
    b = pool + place_of(cells, cell, C) + rank * C.IN
    for step in range(count):
        slot = start + step
        token = tl.load(pieces.token_indices + slot).to(tl.int64)
        row = y + token * stride_y + first_output
        partial = partials + (slot.to(tl.int64) * NUM_MODULES + module) * NUM_SPLITS * C.MAX_RANK
        token_scale = tl.load(pieces.token_scales + slot)
        before = tl.load(row + outputs, mask=outputs < out_features, other=0.0).to(tl.float32)
        if HAS_VECTORS:
            before = with_vectors(
                *(before, before, pool, cells.vectors, cell, token_scale),
                *(outputs, out_features, row.dtype.element_ty, UNIT),
            )
        expand_line(
            *(row, before, partial, b, rank, scale * token_scale, outputs, out_features, C),
            *(NUM_SPLITS, SPLITS, BLOCK_N, BLOCK_R),
        )
