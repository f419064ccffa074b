"""Multi-LoRA of experts: a row has the matrices of its token's adapter and of its own expert.

The cells of a module's experts follow one another. Other terms are those of programs.lora.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.grouped_linear import rows_of_tile
from loraplex.kernels.cuda.programs.lora import (
    expand_line,
    outputs_of_tile,
    piece_at,
    place_of,
    shrink_line,
)
from loraplex.kernels.cuda.programs.lora_matrix import expand_tile, shrink_tile
from loraplex.kernels.cuda.programs.modules import pick


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry", "first_choice", "num_choices"])
def shrink_few_of_experts(
    x,
    partials,  # [slots, num_choices, modules, splits, ranks]
    pool,
    cells,
    pieces,
    experts,  # [T, NUM_CHOSEN]
    stride_x,
    cells_of_entry,
    first_cell,
    first_choice,  # of this launch, and how many there are
    num_choices,
    C,
    COLUMNS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    DIVISOR: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # of a split
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: one split of the inputs, all ranks of one module, one choice of one piece."""
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    split = program % NUM_SPLITS
    module = program // NUM_SPLITS % NUM_MODULES
    unit = program // (NUM_SPLITS * NUM_MODULES)
    piece, choice = unit // num_choices, unit % num_choices
    entry, start, count = piece_at(pieces, piece)
    entry = tl.maximum(entry, 0)  # an empty piece has no tokens
    first = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    for step in range(count):
        slot = start + step
        token = tl.load(pieces.token_indices + slot).to(tl.int64)
        pair = token * NUM_CHOSEN + first_choice + choice
        cell = first + tl.load(experts + pair)
        rank = tl.load(cells.ranks + cell)
        a = pool + place_of(cells, cell, C)
        row = slot.to(tl.int64) * num_choices + choice
        place = (row * NUM_MODULES + module) * NUM_SPLITS + split
        partial = partials + place * C.MAX_RANK
        line = x + pair // DIVISOR * stride_x
        shrink_line(partial, line, a, rank, split, C, NUM_BLOCKS, BLOCK_K, BLOCK_R)


@triton.jit(
    do_not_specialize=[
        "first_cell",
        "cells_of_entry",
        "first_choice",
        "num_choices",
        "first_piece",
    ]
)
def expand_few_of_experts(
    y,  # [T * NUM_CHOSEN, any]
    partials,
    pool,
    cells,
    pieces,
    experts,
    stride_y,
    cells_of_entry,
    first_cell,
    first_choice,
    num_choices,
    first_piece,  # of the wave
    C,
    COLUMNS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # NUM_SPLITS, rounded up to a power of two
    NUM_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: BLOCK_N outputs of one module, one choice of one piece."""
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    unit = program // NUM_TILES
    piece, choice = first_piece + unit // num_choices, unit % num_choices
    entry, start, count = piece_at(pieces, piece)
    entry = tl.maximum(entry, 0)  # an empty piece has no tokens
    module, outputs, out_features, first_output = outputs_of_tile(
        *(program % NUM_TILES, OUT_FEATURES, OUT_OFFSETS, C, BLOCK_N)
    )
    first = entry * cells_of_entry + first_cell + pick(module, COLUMNS)
    for step in range(count):
        slot = start + step
        token = tl.load(pieces.token_indices + slot).to(tl.int64)
        pair = token * NUM_CHOSEN + first_choice + choice
        cell = first + tl.load(experts + pair)
        rank = tl.load(cells.ranks + cell)
        if rank > 0:
            b = pool + place_of(cells, cell, C) + rank * C.IN
            row = slot.to(tl.int64) * num_choices + choice
            partial = partials + (row * NUM_MODULES + module) * NUM_SPLITS * C.MAX_RANK
            scale = tl.load(cells.scales + cell) * tl.load(pieces.token_scales + slot)
            line = y + pair * stride_y + first_output
            before = tl.load(line + outputs, mask=outputs < out_features, other=0.0)
            expand_line(
                *(line, before.to(tl.float32), partial, b, rank, scale),
                *(outputs, out_features, C, NUM_SPLITS, SPLITS, BLOCK_N, BLOCK_R),
            )


@triton.jit(
    do_not_specialize=["first_cell", "cells_of_entry", "first_user", "num_splits", "num_blocks"]
)
def shrink_many_of_experts(
    x,
    partials,  # [T * NUM_CHOSEN, modules, splits, ranks]
    pool,
    cells,
    users,
    pairs,
    starts,
    stride_x,
    cells_of_entry,
    first_cell,
    first_user,  # of the wave
    num_splits,
    num_blocks,  # of a split, BLOCK_K inputs each
    C,
    COLUMNS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    DIVISOR: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: one split of the inputs, all ranks of one module, one tile of an expert's rows.

    The adapters of the tile's rows come one after another; each takes its own rows.
    """
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    split = program % num_splits
    module = program // num_splits % NUM_MODULES
    tile = program // (num_splits * NUM_MODULES)
    expert, first, end = rows_of_tile(starts, tile, NUM_EXPERTS, BLOCK_E, BLOCK_T)
    places = first + tl.arange(0, BLOCK_T)
    pair = tl.load(pairs + places, mask=places < end, other=0).to(tl.int64)
    entries = tl.load(users.entries + first_user + pair // NUM_CHOSEN, mask=places < end, other=-1)
    lines = x + (pair // DIVISOR)[:, None] * stride_x
    rows = ((pair * NUM_MODULES + module) * num_splits + split)[:, None]
    entry = tl.max(entries, 0)
    while entry >= 0:
        cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS) + expert
        rank = tl.load(cells.ranks + cell)
        a = pool + place_of(cells, cell, C)
        shrink_tile(
            *(partials + rows * C.MAX_RANK, lines, entries == entry, a, rank, split, num_blocks),
            *(C, BLOCK_T, BLOCK_K, BLOCK_R),
        )
        entry = tl.max(tl.where(entries < entry, entries, -1), 0)


@triton.jit(do_not_specialize=["first_cell", "cells_of_entry", "first_user", "num_splits"])
def expand_many_of_experts(
    y,  # [T * NUM_CHOSEN, any]
    partials,
    pool,
    cells,
    users,
    pairs,
    starts,
    stride_y,
    cells_of_entry,
    first_cell,
    first_user,
    num_splits,
    C,
    COLUMNS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: BLOCK_N outputs of one module, one tile of an expert's rows."""
    NUM_MODULES: tl.constexpr = len(COLUMNS)
    program = tl.program_id(0)
    expert, first, end = rows_of_tile(
        *(starts, program // NUM_TILES, NUM_EXPERTS, BLOCK_E, BLOCK_T)
    )
    places = first + tl.arange(0, BLOCK_T)
    pair = tl.load(pairs + places, mask=places < end, other=0).to(tl.int64)
    users_of_rows = first_user + pair // NUM_CHOSEN
    entries = tl.load(users.entries + users_of_rows, mask=places < end, other=-1)
    row_scales = tl.load(users.scales + users_of_rows, mask=entries >= 0, other=0.0)
    module, outputs, out_features, first_output = outputs_of_tile(
        *(program % NUM_TILES, OUT_FEATURES, OUT_OFFSETS, C, BLOCK_N)
    )
    y_rows = y + pair[:, None] * stride_y + first_output
    rows = ((pair * NUM_MODULES + module) * num_splits)[:, None]
    entry = tl.max(entries, 0)
    while entry >= 0:
        cell = entry * cells_of_entry + first_cell + pick(module, COLUMNS) + expert
        rank = tl.load(cells.ranks + cell)
        if rank > 0:
            b = pool + place_of(cells, cell, C) + rank * C.IN
            scales = row_scales * tl.load(cells.scales + cell)
            expand_tile(
                *(y_rows, partials + rows * C.MAX_RANK, entries == entry, b, rank, scales),
                *(outputs, out_features, num_splits, C, BLOCK_T, BLOCK_N, BLOCK_R),
            )
        entry = tl.max(tl.where(entries < entry, entries, -1), 0)
