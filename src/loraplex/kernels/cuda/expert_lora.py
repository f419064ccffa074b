"""Multi-LoRA of experts on a GPU. Grids follow from shapes alone; ops read the routes there.

Pieces of few tokens, and whatever must have the same bits in any company: a program takes the pairs
of one piece and one choice, one after another, each with the matrices of its own expert. In a step
that decodes with many adapters hardly two pairs share a matrix.

Many tokens: tiles of an expert's pairs, as in the product before, so that nothing is sorted anew. A
program computes each adapter of its tile for the rows that have it; rows of one sequence lie
together, so there are few. Tokens without adapters, and experts that none of them adapts, end their
programs at once.
"""

from collections.abc import Sequence

import torch
import triton

from loraplex.kernels.cuda.grouped_linear import most_tiles
from loraplex.kernels.cuda.lora import (
    FEWEST_ROWS,
    MATRIX_OUTPUTS,
    LoraKernel,
    few_tiles,
    many_options,
    splits_of_many,
)
from loraplex.kernels.cuda.lora_vectors import users_of
from loraplex.kernels.cuda.lora_work import LoraWork
from loraplex.kernels.cuda.programs.expert_lora import (
    expand_few_of_experts,
    expand_many_of_experts,
    shrink_few_of_experts,
    shrink_many_of_experts,
)
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.routing import Routes

_PARTIAL_BYTES = 64 << 20
"""Maximum bytes of partial sums, if those of one choice are not more."""

_MOST_ROWS = 32
"""Rows of a tile for matrix units: more do not fit into the registers of an A100."""


def add_expert_lora(
    kernel: LoraKernel,
    y: torch.Tensor,
    x: torch.Tensor,
    batch: LoraBatch,
    routes: Routes,
    layer: int,
    modules: Sequence[str],
    out_offsets: Sequence[int],
    *,
    is_row: bool = False,
) -> None:
    """Same as kernels.experts.add_expert_lora. Rows of x and y are contiguous.

    is_row: ranks have a part of the inputs each.
    """
    num_tokens = len(routes.experts)
    places = (layer, modules, out_offsets)
    work = kernel.work(y, x, batch, *places, num_tokens=num_tokens, is_row=is_row)
    if kernel.takes_few(work):
        _add_few(y, x, work, routes)
    else:
        _add_many(y, x, work, routes)


def _add_few(y: torch.Tensor, x: torch.Tensor, work: LoraWork, routes: Routes) -> None:
    """Some choices at a time: partial sums of all of a large step would take GiBs."""
    tiles, num_chosen = few_tiles(work), routes.num_chosen
    num_slots, num_modules = len(work.segments.token_indices), work.num_modules
    sums = (num_modules, tiles.num_splits, work.max_rank)
    bytes_of_choice = 4 * num_slots * num_modules * tiles.num_splits * work.max_rank
    at_once = min(num_chosen, max(1, _PARTIAL_BYTES // bytes_of_choice))
    for first_choice in range(0, num_chosen, at_once):
        num_choices = min(at_once, num_chosen - first_choice)
        shape = (num_slots, num_choices, *sums)
        partials = torch.empty(shape, dtype=torch.float32, device=y.device)
        _add_few_choices(y, x, partials, work, routes, first_choice)


def _add_few_choices(
    y: torch.Tensor,
    x: torch.Tensor,
    partials: torch.Tensor,
    work: LoraWork,
    routes: Routes,
    first_choice: int,
) -> None:
    tiles, linear, num_choices = few_tiles(work), work.linear, partials.shape[1]
    choices = (first_choice, num_choices)
    common = (work.pool, work.cells, work.pieces, routes.experts)
    num_waves, num_pieces = work.segments.entries.shape
    num_programs = num_waves * num_pieces * num_choices * work.num_modules * tiles.num_splits
    shrink_few_of_experts[(num_programs,)](
        *(x, partials, *common, x.stride(0), work.cells_of_entry, linear.first_cell, *choices),
        C=work.constants,
        COLUMNS=linear.columns,
        NUM_CHOSEN=routes.num_chosen,
        DIVISOR=len(y) // len(x),
        **tiles.shrink,
    )
    partials = work.over_ranks(partials)
    num_tiles = work.num_tiles(tiles.block_n)
    for wave in range(num_waves):
        expand_few_of_experts[(num_pieces * num_choices * num_tiles,)](
            *(y, partials, *common, y.stride(0), work.cells_of_entry, linear.first_cell),
            *choices,
            wave * num_pieces,
            C=work.constants,
            COLUMNS=linear.columns,
            NUM_CHOSEN=routes.num_chosen,
            OUT_FEATURES=linear.out_features,
            OUT_OFFSETS=linear.out_offsets,
            NUM_TILES=num_tiles,
            **tiles.expand_options(partials),
        )


def _add_many(y: torch.Tensor, x: torch.Tensor, work: LoraWork, routes: Routes) -> None:
    """One wave after another: each adds to what the last one stored."""
    linear, num_experts, num_pairs = work.linear, routes.num_experts, len(y)
    block_t = _rows_of_tile(num_pairs, num_experts)
    num_row_tiles = most_tiles(num_pairs, num_experts, block_t)
    num_splits = splits_of_many(work, num_row_tiles)
    shrink, expand = many_options(work, num_splits, block_t)
    shape = (num_pairs, work.num_modules, num_splits, work.max_rank)
    partials = torch.empty(shape, dtype=torch.float32, device=y.device)
    users = users_of(work, len(routes.experts))
    common = (work.pool, work.cells, users, routes.pairs, routes.starts)
    routing = {
        "NUM_EXPERTS": num_experts,
        "NUM_CHOSEN": routes.num_chosen,
        "BLOCK_E": triton.next_power_of_2(num_experts),
    }
    num_tiles = work.num_tiles(MATRIX_OUTPUTS)
    for wave in range(len(users.entries)):
        places = (work.cells_of_entry, linear.first_cell, wave * len(routes.experts))
        shrink_many_of_experts[(num_row_tiles * work.num_modules * num_splits,)](
            *(x, partials, *common, x.stride(0), *places),
            C=work.constants,
            COLUMNS=linear.columns,
            DIVISOR=num_pairs // len(x),
            **routing,
            **shrink,
        )
        summed = work.over_ranks(partials)
        expand_many_of_experts[(num_row_tiles * num_tiles,)](
            *(y, summed, *common, y.stride(0), *places),
            C=work.constants,
            COLUMNS=linear.columns,
            OUT_FEATURES=linear.out_features,
            OUT_OFFSETS=linear.out_offsets,
            NUM_TILES=num_tiles,
            **routing,
            **(expand | {"num_splits": summed.shape[-2]}),
        )


def _rows_of_tile(num_pairs: int, num_experts: int) -> int:
    """Rows that an expert has on average, as a power of two that matrix units can take."""
    average: int = triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))
    return min(max(average, FEWEST_ROWS), _MOST_ROWS)
