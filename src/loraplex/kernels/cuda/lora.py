"""Multi-LoRA on a GPU: x A^T of all modules of a fused linear layer, then B^T, two launches a wave.

What a step of distinct adapters costs is that their matrices are read, and that kernels start: for
32 tokens, rank 16 and q, k and v of an 8B model a layer's matrices are 19 MB, at 4.3 TB/s 4.4 us,
the time of a few kernel launches. So one launch shrinks for all modules (and waves: x
does not change), a second one expands and adds. They are two because the outputs need the whole of
x A^T: to compute it again for each tile of outputs would read A a dozen times.

The grids follow from shapes alone, since a CUDA graph repeats them; a program whose piece is empty,
or whose module is not adapted, ends at once. Ranks are in device memory, so a program takes all
ranks of its module in a loop: a grid over ranks would be mostly programs with nothing to do.

Pieces of few tokens (programs.lora): a program is one warp and a tile of A or B^T, 16 ranks by 512
bytes, 8 KiB in loads of 16 bytes; it takes the piece's tokens one by one, the second from the
cache. A lone warp sums over ranks within a thread, and over inputs by shuffles: no warp waits for
another. For 32 distinct adapters on q, k and v of 4096 inputs and 4096 + 2 * 1024 outputs 1536
programs shrink (16 splits) and 768 expand: by their registers (70 and 128 a thread) the 132
processors of an H200 hold all of them at a time, 12 and 6 each, so 40 KiB and more are in flight to
each where 26 are needed. Splits and tiles are the same for any number of tokens, so a token's bits
do not depend on others. Splits write their sums apart, and the expanding program adds them in one
order: there are no atomics.

Pieces of many tokens (programs.lora_matrix) use matrix units, with as few splits as fill the
processors. Not for float32, of which those take fewer bits, and not where a token's bits must be
the same in any company.

Experts, few tokens or a token's bits the same in any company: a program takes the pairs of one
piece and one choice, one after another, each with the matrices of its own expert. In a step that
decodes with many adapters hardly two pairs share a matrix. Many tokens: tiles of an expert's pairs,
as in the product before, so that nothing is sorted anew. A program computes each adapter of its
tile for the rows that have it; rows of one sequence lie together, so there are few. Tokens without
adapters, and experts that none of them adapts, end their programs at once.

Output vectors, such as DoRA's factors: in a step of one wave and few tokens the second program of
LoRA applies them. Other steps have a launch of their own, ahead of LoRA's: each adapter's share is
of the base's outputs.
"""

import dataclasses
from typing import Any

import torch
import triton

from loraplex.kernels.adapter_parts import add_vectors
from loraplex.kernels.cuda.grouped_linear import most_tiles
from loraplex.kernels.cuda.lora_work import (
    MATRIX_RANKS,
    FusedLinear,
    LinearKey,
    LoraWork,
    fused_linear,
    table_on_device,
)
from loraplex.kernels.cuda.programs import lora_vectors
from loraplex.kernels.cuda.programs.expert_lora import (
    expand_few_of_experts,
    expand_many_of_experts,
    shrink_few_of_experts,
    shrink_many_of_experts,
)
from loraplex.kernels.cuda.programs.lora import expand_few, shrink_few
from loraplex.kernels.cuda.programs.lora_matrix import expand_many, shrink_many
from loraplex.kernels.cuda.ranks import RankSums
from loraplex.kernels.lora import FEW_TOKENS, LoraBatch, LoraPlace, lora_segments, vector_uses
from loraplex.kernels.routing import Routes
from loraplex.kernels.sizes import DEFAULT_SIZES, ProgramSizes

_RANKS = 16
"""Ranks that a program takes at a time, of few tokens."""

_WIDTH_BYTES = 512
"""Inputs or outputs of a program for few tokens: 16 bytes for each thread of a warp."""

FEWEST_ROWS = 16
"""Minimum rows of a matrix for matrix units."""

MATRIX_INPUTS = 128
MATRIX_OUTPUTS = 128

_PROGRAMS = 2 * 132
"""So many keep an H200 busy: two for each of its processors."""

_MOST_SPLITS = 8

_PARTIAL_BYTES = 64 << 20
"""Maximum bytes of partial sums of experts, if those of one choice are not more."""

_MOST_ROWS = 32
"""Rows of a tile of experts for matrix units: more do not fit into the registers of an A100."""

_BLOCK = 512
"""Maximum outputs of a program for vectors."""


class CudaLora:
    """Remembers the fused linear layers that it has seen."""

    def __init__(
        self,
        device: torch.device,
        *,
        batch_invariant: bool,
        sums: RankSums | None = None,
        sizes: ProgramSizes = DEFAULT_SIZES,
    ) -> None:
        """sums: over the ranks of a row layer; None: there is one rank."""
        self._most_splits = sizes.lora_splits
        self._device = device
        self._sums = sums
        self._batch_invariant = batch_invariant
        self._linears: dict[LinearKey, FusedLinear] = {}

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        place: LoraPlace,
    ) -> None:
        """Same as kernels.lora.add_lora. Rows of x and y are contiguous, of the pool's dtype.

        place.num_blocks of 1 or more: ranks have a part of the inputs each.
        """
        work = self.work(y, x, batch, place, num_tokens=len(x))
        is_few = self.takes_few(work)
        # Recorded steps have one wave: its vectors cost no launch of their own.
        has_vectors = is_few and len(work.segments.entries) == 1
        names = [(place.layer, module) for module in place.modules]
        if any(name in use.parts.vectors for use in batch.parts for name in names):
            # Each share is of the base's own outputs, so those of the table go with these.
            add_vectors(y, (*vector_uses(batch, place), *batch.parts), *place[:3])
            has_vectors = False
        elif batch.has_vectors and not has_vectors:
            add_table_vectors(y, work)
        if is_few:
            _add_few(y, x, work, has_vectors=has_vectors)
        else:
            _add_many(y, x, work)

    def add_experts(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        routes: Routes,
        place: LoraPlace,
    ) -> None:
        """Same as kernels.routing.add_expert_lora. Rows of x and y are contiguous."""
        work = self.work(y, x, batch, place, num_tokens=len(routes.experts))
        if self.takes_few(work):
            _add_few_of_experts(y, x, work, routes)
        else:
            _add_many_of_experts(y, x, work, routes)

    def size_of(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        *places: Routes | LoraPlace,
    ) -> str | None:
        """Return the name of the size that decides `add`, or `add_experts`; None: a constant."""
        place, num_tokens = places[-1], len(x)
        assert isinstance(place, LoraPlace)
        if isinstance(places[0], Routes):
            num_tokens = len(places[0].experts)
        is_few = self.takes_few(self.work(y, x, batch, place, num_tokens=num_tokens))
        return "lora_splits" if is_few else None

    def takes_few(self, work: LoraWork) -> bool:
        """Whether rows are computed one by one, and not by matrix units."""
        is_few = work.segments.longest <= FEW_TOKENS
        return is_few or self._batch_invariant or work.pool.dtype == torch.float32

    def work(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        place: LoraPlace,
        *,
        num_tokens: int,
    ) -> LoraWork:
        """Return what the two kernels of a call share."""
        assert x.stride(1) == y.stride(1) == 1, "rows are contiguous"
        assert x.dtype == y.dtype == batch.pool.dtype, "one dtype"
        segments = batch.segments
        if segments is None:
            host = lora_segments(batch, num_tokens)
            segments = host.at(host.packed.to(self._device))
        key = (batch.table.cells, batch.table.alignment, place)
        linear = self._linears.get(key)
        if linear is None:
            linear = self._linears[key] = fused_linear(*key)
        return LoraWork(
            linear,
            table_on_device(batch.table),
            batch.pool,
            segments,
            cells_of_entry=len(batch.table.cells),
            unit=batch.table.alignment,
            max_rank=triton.cdiv(batch.table.max_rank, MATRIX_RANKS) * MATRIX_RANKS,
            sums=self._sums if place.num_blocks else None,
            most_splits=self._most_splits,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class FewTiles:
    """Tiles of rows that are computed one by one: the same for any number of them."""

    num_splits: int
    block_n: int
    shrink: dict[str, int]
    """Options of the programs."""
    expand: dict[str, int]

    def expand_options(self, partials: torch.Tensor) -> dict[str, int]:
        """Return the second program's options for partial sums [..., splits, ranks]."""
        num_splits = partials.shape[-2]
        splits = triton.next_power_of_2(num_splits)
        return self.expand | {"NUM_SPLITS": num_splits, "SPLITS": splits}


def few_tiles(work: LoraWork) -> FewTiles:
    """Return the tiles of a linear layer."""
    linear = work.linear
    width = _WIDTH_BYTES // work.pool.itemsize
    block_k = min(width, triton.next_power_of_2(linear.in_features))
    block_n = min(width, triton.next_power_of_2(max(linear.out_features)))
    num_blocks = triton.cdiv(linear.in_features, block_k * work.most_splits)
    num_splits = triton.cdiv(linear.in_features, block_k * num_blocks)
    options = {"BLOCK_R": _RANKS, "num_warps": 1}
    shrink = options | {"NUM_SPLITS": num_splits, "NUM_BLOCKS": num_blocks, "BLOCK_K": block_k}
    expand = options | {"BLOCK_N": block_n}
    return FewTiles(num_splits, block_n, shrink, expand)


def _add_few(y: torch.Tensor, x: torch.Tensor, work: LoraWork, *, has_vectors: bool) -> None:
    """has_vectors: the second program applies the vectors of the table, too."""
    tiles = few_tiles(work)
    partials = work.partials(tiles.num_splits)
    _shrink(shrink_few, x, partials, work, tiles.shrink)
    partials = work.over_ranks(partials)
    options = tiles.expand_options(partials) | {"HAS_VECTORS": has_vectors, "UNIT": work.unit}
    _expand(expand_few, y, partials, work, tiles.block_n, options)


def _add_many(y: torch.Tensor, x: torch.Tensor, work: LoraWork) -> None:
    num_splits = splits_of_many(work, work.segments.entries.numel())
    block_t = max(FEWEST_ROWS, triton.next_power_of_2(work.segments.longest))
    shrink, expand = many_options(work, num_splits, block_t)
    partials = work.partials(num_splits)
    _shrink(shrink_many, x, partials, work, shrink)
    partials = work.over_ranks(partials)
    _expand(
        *(expand_many, y, partials, work, MATRIX_OUTPUTS),
        expand | {"num_splits": partials.shape[-2]},
    )


def many_options(
    work: LoraWork, num_splits: int, block_t: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the options of both programs for matrix units."""
    num_blocks = triton.cdiv(work.linear.in_features, num_splits * MATRIX_INPUTS)
    options = {"num_splits": num_splits, "BLOCK_T": block_t, "BLOCK_R": MATRIX_RANKS}
    # More sums do not fit into the registers of four warps. The loop over ranks is short: to load
    # ahead in it would only take memory from other programs.
    resources = {"num_warps": 4 if block_t == FEWEST_ROWS else 8, "num_stages": 1}
    shrink = options | {"num_blocks": num_blocks, "BLOCK_K": MATRIX_INPUTS}
    return shrink, options | resources | {"BLOCK_N": MATRIX_OUTPUTS}


def splits_of_many(work: LoraWork, num_pieces: int) -> int:
    """Splits of an input for matrix units: enough to fill the processors, and a power of two."""
    most: int = min(_MOST_SPLITS, triton.cdiv(work.linear.in_features, MATRIX_INPUTS))
    wanted: int = triton.cdiv(_PROGRAMS, num_pieces * work.num_modules)
    return 1 << (min(most, wanted).bit_length() - 1)


def _shrink(
    program: Any,
    x: torch.Tensor,
    partials: torch.Tensor,
    work: LoraWork,
    options: dict[str, int],
) -> None:
    """Launch the first program, for all waves."""
    num_programs = work.segments.entries.numel() * partials.shape[1] * partials.shape[2]
    program[(num_programs,)](
        *(x, partials, work.pool, work.cells, work.pieces),
        *(x.stride(0), work.cells_of_entry, work.linear.first_cell),
        C=work.constants,
        COLUMNS=work.linear.columns,
        **options,
    )


def _expand(
    program: Any,
    y: torch.Tensor,
    partials: torch.Tensor,
    work: LoraWork,
    width: int,
    options: dict[str, int],
) -> None:
    """Launch the second program wave after wave: each adds to what the last one stored."""
    linear = work.linear
    num_waves, num_pieces = work.segments.entries.shape
    num_tiles = work.num_tiles(width)
    for wave in range(num_waves):
        program[(num_pieces * num_tiles,)](
            *(y, partials, work.pool, work.cells, work.pieces),
            *(y.stride(0), work.cells_of_entry, work.linear.first_cell, wave * num_pieces),
            C=work.constants,
            COLUMNS=linear.columns,
            OUT_FEATURES=linear.out_features,
            OUT_OFFSETS=linear.out_offsets,
            NUM_TILES=num_tiles,
            **options,
        )


def _add_few_of_experts(y: torch.Tensor, x: torch.Tensor, work: LoraWork, routes: Routes) -> None:
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


def _add_many_of_experts(y: torch.Tensor, x: torch.Tensor, work: LoraWork, routes: Routes) -> None:
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


def add_table_vectors(y: torch.Tensor, work: LoraWork) -> None:
    """Apply to y [T, any] what the table has besides LoRA of the modules of a linear layer."""
    linear = work.linear
    block = min(_BLOCK, triton.next_power_of_2(max(linear.out_features)))
    num_tokens, num_tiles = len(y), work.num_tiles(block)
    users = users_of(work, num_tokens)
    lora_vectors.add_vectors[(num_tokens * num_tiles,)](
        *(y, work.pool, work.table.vectors, users, y.stride(0)),
        *(work.cells_of_entry, linear.first_cell, len(users.entries), num_tokens),
        COLUMNS=linear.columns,
        OUT_FEATURES=linear.out_features,
        OUT_OFFSETS=linear.out_offsets,
        NUM_TILES=num_tiles,
        UNIT=work.unit,
        BLOCK_N=block,
        num_warps=2,  # 16 bytes for each thread
    )


def users_of(work: LoraWork, num_tokens: int) -> lora_vectors.Users:
    """Return the adapter of each token in each wave, [waves, num_tokens]."""
    segments = work.segments
    num_waves, num_pieces = segments.entries.shape
    shape, device = (num_waves, num_tokens), work.pool.device
    users = lora_vectors.Users(
        torch.full(shape, -1, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
    lora_vectors.spread_users[(num_waves * num_pieces,)](
        *(users, work.pieces, num_tokens, num_pieces),
        BLOCK_T=triton.next_power_of_2(segments.longest),
    )
    return users
