"""The low-rank part of a linear layer: y += scale * (x A^T) B^T, for many adapters in one batch.

Owns the data layout that such an op reads (`LoraTable`, `LoraBatch`) and its torch reference.
Does not know where an adapter came from, nor who decides what is in the pool."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.adapter_parts import (
    MAX_VECTORS,
    AdapterParts,
    PartsUse,
    add_vectors,
    of_rows,
    vectors_at,
)
from loraplex.kernels.host_tensors import tiled_product

_SECTION = 4
"""Each array of LoraSegments begins at a multiple of so many elements, which are 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoraSegments:
    """The groups of a LoraBatch in pieces, as an accelerator reads them: views of one array.

    Piece i of wave w applies the adapter entries[w, i] to the tokens
    token_indices[starts[w, i] : starts[w, i] + counts[w, i]]. After a wave's pieces there are
    empty ones, whose entry is -1.
    """

    packed: torch.Tensor  # [any] int32, on the host at first
    entries: torch.Tensor  # [waves, pieces] int32
    starts: torch.Tensor  # [waves, pieces] int32
    counts: torch.Tensor  # [waves, pieces] int32
    token_indices: torch.Tensor  # [waves * num_tokens] int32
    token_scales: torch.Tensor  # [waves * num_tokens] float32
    longest: int
    """Tokens of the longest piece that there may be."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.packed,)

    def at(self, packed: torch.Tensor) -> "LoraSegments":
        """The same in a copy of `packed`, such as one on a device."""
        num_waves, num_pieces = self.entries.shape
        return segments_in(packed, num_waves, num_pieces, len(self.token_indices), self.longest)


def segments_in(
    packed: torch.Tensor, num_waves: int, num_pieces: int, num_indices: int, longest: int
) -> LoraSegments:
    """Return the segments of which `packed` is, or will be, the array."""
    firsts = section_starts(num_waves, num_pieces, num_indices)
    entries, starts, counts = (
        packed[first : first + num_waves * num_pieces].view(num_waves, num_pieces)
        for first in firsts[:3]
    )
    indices, scales = (packed[first : first + num_indices] for first in firsts[3:5])
    scales = scales.view(torch.float32)
    return LoraSegments(packed, entries, starts, counts, indices, scales, longest)


def section_starts(num_waves: int, num_pieces: int, num_indices: int) -> list[int]:
    """Where entries, starts, counts, token_indices and token_scales begin, and where all ends."""
    sizes = [num_waves * num_pieces] * 3 + [num_indices] * 2
    return list(itertools.accumulate((size + -size % _SECTION for size in sizes), initial=0))


IntArray = npt.NDArray[np.int64]

FEW_TOKENS = 4
"""A piece of no more is worked on token by token: reading the matrices is what takes time."""

MOST_REPEATED_TOKENS = 256
"""A step of no more is cut into short pieces, so that the shapes are those of its size."""

_PIECE_SIZES = (16, 32, 64)
"""Else a piece has at most so many tokens: the smallest that the largest group fits into."""

CELL_BYTES = 16
"""Bytes of a cell of one adapter in a LoraTable: its offset, rank and scale."""

DEVICE_CELL_BYTES = CELL_BYTES + 4 * MAX_VECTORS
"""Bytes of a cell of a table that an accelerator reads, with the words of its vectors."""

ModuleShapes = Mapping[str, tuple[int, int]]
"""(in_features, out_features) by module."""


class LoraCells:
    """Numbers of an adapter's cells: one for each module of each layer, layer after layer.

    A module of experts has one for each expert, one after another. Layers may have different
    modules. Objects are compared by identity, so that a backend can keep what it derives from one.
    """

    def __init__(
        self, layers: Sequence[ModuleShapes], num_experts: Sequence[Mapping[str, int]] | None = None
    ) -> None:
        """num_experts: of each layer, by module, of modules that have experts; None: none has."""
        self.layers = tuple(layers)
        self.num_experts = tuple(num_experts or [{}] * len(layers))
        cells = [
            ((layer, module, expert), shape)
            for layer, modules in enumerate(layers)
            for module, shape in modules.items()
            for expert in range(self.num_experts[layer].get(module, 1))
        ]
        self.shapes = tuple(shape for _, shape in cells)
        """(in_features, out_features) of each cell."""
        self.by_place = {place: cell for cell, (place, _) in enumerate(cells)}
        """Cell of each (layer, module, expert)."""

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, place: tuple[int, str]) -> bool:
        """Return whether the module of a layer has a cell."""
        return (*place, 0) in self.by_place


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLoraTable:
    """Copy of a LoraTable on an accelerator, entry by entry as new as the pool's content."""

    offsets: torch.Tensor  # [entries, cells] int64
    ranks: torch.Tensor  # [entries, cells] int32
    scales: torch.Tensor  # [entries, cells] float32
    vectors: torch.Tensor  # [entries, cells, MAX_VECTORS] int32: words of kernels.adapter_parts


@dataclasses.dataclass(frozen=True, slots=True)
class LoraTable:
    """Places of the adapters' matrices in the pool. Fixed shape, on the host, written in place.

    One entry per adapter in the pool; rank 0 means that the adapter leaves the module alone. At
    `offsets[e, c]` lies A [rank, in_features], row-major; B transposed, [rank, out_features],
    row-major, follows it at once.
    """

    cells: LoraCells
    offsets: IntArray  # [entries, cells], in elements
    ranks: npt.NDArray[np.int32]  # [entries, cells]
    scales: npt.NDArray[np.float32]  # [entries, cells], the adapter's own scale
    on_device: DeviceLoraTable | None = None
    """Copy for a backend that reads the table on its device."""
    alignment: int = 1
    """Every offset that is ever in the table is a multiple of it."""
    max_rank: int = 256
    """No rank that is ever in the table is larger."""
    vectors: npt.NDArray[np.int32] | None = None  # [entries, cells, MAX_VECTORS]
    """Words of kernels.adapter_parts. None: vectors are in LoraBatch.parts."""


class LoraUse(NamedTuple):
    """Neighbouring tokens of a step that one adapter applies to."""

    wave: int
    """How many adapters of the tokens come before. In a wave a token occurs once."""
    entry: int
    """Row of the LoraTable."""
    first_token: int
    num_tokens: int
    scale: float
    """The request's own."""


class LoraGroup(NamedTuple):
    """All tokens that one adapter applies to in one wave."""

    entry: int
    token_indices: torch.Tensor  # [n] int64, on the device
    token_scales: torch.Tensor  # [n] float32, on the device


class LoraPlace(NamedTuple):
    """Fused linear layer that adapters change: some modules of one layer with one input.

    Module i writes the columns from out_offsets[i] on (its own out_features of them): for a fused
    q/k/v projection modules = ("q_proj", "k_proj", "v_proj"), out_offsets = (0, q_size, q_size +
    kv_size).
    """

    layer: int
    modules: tuple[str, ...]
    out_offsets: tuple[int, ...]
    num_blocks: int = 0
    """Blocks of the layer, see Kernels.pack_linear: x A^T is added over blocks and ranks alike."""


class Arrivals(Protocol):
    """Adapters of a batch that are still on their way to the pool, layer by layer."""

    def wait_for(self, layer: int) -> None:
        """What is enqueued from now on comes after the matrices of this layer and those before."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoraBatch:
    """The adapters of one step as flat arrays. Built once (`lora_batch`), used by every layer.

    Group g applies the adapter entries[g] to token_indices[group_starts[g] : group_starts[g + 1]].
    Wave w is the groups wave_starts[w] .. wave_starts[w + 1] - 1: every row's first adapters, then
    every row's second ones. So the order of a row's sums does not depend on the other rows.
    """

    pool: torch.Tensor  # [num_pages * page_elements]
    table: LoraTable
    entries: IntArray  # [groups], on the host, as are the starts
    group_starts: IntArray  # [groups + 1]
    wave_starts: IntArray  # [waves + 1]
    token_indices: torch.Tensor  # [n] int64, on the device
    token_scales: torch.Tensor  # [n] float32, on the device
    parts: tuple[PartsUse, ...] = ()
    """Changes by adapters of this step in addition to LoRA, in the order of the groups."""
    has_vectors: bool = False
    """Whether the table has vectors of an adapter of this step."""
    head_table: LoraTable | None = None
    """Places of LoRA of lm_head, if an adapter of this step has some: one layer, whose modules are
    neighbouring blocks of outputs. It has the same entries."""
    segments: LoraSegments | None = None
    """The groups in pieces, for a backend that reads them on its device."""
    arrivals: Arrivals | None = None
    """None: all adapters have arrived."""

    @property
    def num_waves(self) -> int:
        """How many adapters the token with the most of them has."""
        return len(self.wave_starts) - 1

    @property
    def changes_ends(self) -> bool:
        """Whether an adapter changes the embedding or lm_head, and not only layers."""
        return self.head_table is not None or any(use.parts.changes_ends for use in self.parts)

    def groups(self) -> Iterator[LoraGroup]:
        """One after another, in the order in which they are added up."""
        starts = self.group_starts.tolist()
        for entry, first, end in zip(self.entries.tolist(), starts, starts[1:], strict=False):
            yield LoraGroup(entry, self.token_indices[first:end], self.token_scales[first:end])


def lora_batch(
    pool: torch.Tensor,
    table: LoraTable,
    uses: Sequence[LoraUse],
    device: torch.device | None = None,
) -> LoraBatch:
    """Group the uses by wave and adapter. The arrays of tokens come to the device: the pool's."""
    columns = np.array(uses, np.float64).reshape(-1, len(LoraUse._fields)).T
    order = np.lexsort((columns[1], columns[0]))
    waves, entries, firsts, counts = columns[:4, order].astype(np.int64)
    bounds = np.concatenate(([0], counts.cumsum()))
    heads = np.flatnonzero(_differs_from_last(waves) | _differs_from_last(entries))
    token_indices = np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], counts)
    token_scales = np.repeat(columns[4, order].astype(np.float32), counts)
    return LoraBatch(
        pool,
        table,
        entries[heads],
        np.append(bounds[heads], bounds[-1]),
        np.append(np.flatnonzero(_differs_from_last(waves[heads])), len(heads)),
        torch.from_numpy(token_indices).to(device or pool.device),
        torch.from_numpy(token_scales).to(device or pool.device),
    )


def batch_of_rows(batch: LoraBatch, row_indices: torch.Tensor, num_tokens: int) -> LoraBatch:
    """The batch of what lm_head is computed for: row_indices [S] of the step's num_tokens.

    Its tokens are counted among these rows, and its table is the head's, if there is one. Where it
    is computed for every token, as in a step that only decodes, no host waits for a device.
    """
    if len(row_indices) == num_tokens:
        return dataclasses.replace(batch, table=batch.head_table or batch.table)
    places = torch.full((num_tokens,), -1, dtype=torch.int64, device=row_indices.device)
    places[row_indices] = torch.arange(len(row_indices), device=row_indices.device)
    rows = places[batch.token_indices]
    is_chosen = rows >= 0
    counts = np.concatenate(([0], is_chosen.cpu().numpy().cumsum(dtype=np.int64)))
    return dataclasses.replace(
        batch,
        table=batch.head_table or batch.table,
        group_starts=counts[batch.group_starts],
        token_indices=rows[is_chosen],
        token_scales=batch.token_scales[is_chosen],
        parts=of_rows(batch.parts, places),
        segments=None,
    )


def lora_segments(batch: LoraBatch, num_tokens: int, longest: int | None = None) -> LoraSegments:
    """The groups of a batch, whose arrays are on the host, in pieces of at most `longest` tokens.

    num_tokens: of the step with its padding. For pieces of few tokens their number is that of the
    tokens, the worst case: so the shapes depend on nothing but the numbers of tokens and waves. Of
    longer ones there are only those in use. `longest` None: a good length for the step, which is
    short for all steps that may be repeated.
    """
    longest = longest or _good_length(batch, num_tokens)
    of_group = -(-np.diff(batch.group_starts) // longest)
    of_wave = np.diff(np.append(0, of_group.cumsum())[batch.wave_starts])
    num_pieces = num_tokens if longest <= FEW_TOKENS else int(of_wave.max(initial=1))
    shape = (batch.num_waves, num_pieces, batch.num_waves * num_tokens)
    packed = torch.zeros(section_starts(*shape)[-1], dtype=torch.int32)
    segments = segments_in(packed, *shape, longest)
    groups = np.repeat(np.arange(len(of_group)), of_group)
    starts = batch.group_starts[groups] + _counted(of_group) * longest
    place = np.repeat(np.arange(batch.num_waves), of_wave), _counted(of_wave)
    segments.entries.fill_(-1)
    segments.entries.numpy()[place] = batch.entries[groups]
    segments.starts.numpy()[place] = starts
    segments.counts.numpy()[place] = np.minimum(longest, batch.group_starts[groups + 1] - starts)
    segments.token_indices[: len(batch.token_indices)] = batch.token_indices
    segments.token_scales[: len(batch.token_scales)] = batch.token_scales
    return segments


def _good_length(batch: LoraBatch, num_tokens: int) -> int:
    if num_tokens <= MOST_REPEATED_TOKENS:
        return FEW_TOKENS
    largest = np.diff(batch.group_starts).max(initial=0)
    return next((size for size in _PIECE_SIZES if largest <= size), _PIECE_SIZES[-1])


def _counted(sizes: IntArray) -> IntArray:
    """Return 0 .. n - 1 for each size n, concatenated."""
    return np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)


def head_place(table: LoraTable) -> LoraPlace:
    """Return the modules of a head's table, and the offset of each one's outputs."""
    sizes = [out_features for _, out_features in table.cells.shapes]
    return LoraPlace(0, tuple(table.cells.layers[0]), (0, *itertools.accumulate(sizes[:-1])))


def _differs_from_last(values: IntArray) -> npt.NDArray[np.bool_]:
    """Return whether each value differs from the one before; the first one does."""
    differs = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    batch: LoraBatch,
    place: LoraPlace,
    reduce: "Reduce | None" = None,
) -> None:
    """Add what the adapters of the batch give for fused linear layers to y, in place.

    y: [num_tokens, sum of out_features], x: [num_tokens, in_features]. A module that an adapter
    does not adapt is left alone. Sums are float32 whatever the dtypes; the scale is applied to
    x A^T, which `reduce` adds over ranks first. Other changes of an adapter to the outputs come
    first.
    """
    add_vectors(y, (*vector_uses(batch, place), *batch.parts), *place[:3])
    wanted = [
        (batch.table.cells.by_place[place.layer, module, 0], first)
        for module, first in zip(place.modules, place.out_offsets, strict=True)
    ]
    for group in batch.groups():
        ranks = batch.table.ranks[group.entry]
        adapted = [(cell, first) for cell, first in wanted if ranks[cell] > 0]
        if not adapted:
            continue
        inputs = x[group.token_indices].float()
        for cell, first in adapted:
            delta = lora_delta(inputs, batch, group, cell, reduce)
            columns = y[:, first : first + delta.shape[1]]
            summed = columns[group.token_indices].float() + delta
            columns[group.token_indices] = summed.to(y.dtype)


def vector_uses(batch: LoraBatch, place: LoraPlace) -> Iterator[PartsUse]:
    """Yield the vectors that the table has of these modules, in the order of the groups."""
    words, table = batch.table.vectors, batch.table
    if words is None:
        return
    named = [(place.layer, module) for module in place.modules]
    cells = {each: table.cells.by_place[(*each, 0)] for each in named}
    for group in batch.groups():
        vectors = {
            each: vectors_at(
                *(words[group.entry, cell], batch.pool, table.cells.shapes[cell][1]),
                table.alignment,
            )
            for each, cell in cells.items()
        }
        yield PartsUse(AdapterParts(vectors), group.token_indices, group.token_scales)


Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sum over ranks of what each computed for its part of the inputs."""


def lora_delta(
    inputs: torch.Tensor,
    batch: LoraBatch,
    group: LoraGroup,
    cell: int,
    reduce: Reduce | None = None,
) -> torch.Tensor:
    """Return the addend of one adapter for its tokens: float32 [n, out_features].

    inputs: float32 [n, in_features], those of the group's tokens. reduce: of x A^T [n, rank].
    """
    table = batch.table
    in_features, out_features = table.cells.shapes[cell]
    place = (group.entry, cell)
    rank, offset = int(table.ranks[place]), int(table.offsets[place])
    middle = offset + rank * in_features
    a = batch.pool[offset:middle].view(rank, in_features).float()
    b = batch.pool[middle : middle + rank * out_features].view(rank, out_features).float()
    scales = (group.token_scales * float(table.scales[place])).unsqueeze(1)
    reduced = tiled_product(inputs, a.t())
    if reduce is not None:
        reduced = reduce(reduced)
    return tiled_product(reduced * scales, b)
