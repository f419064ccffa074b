"""Native multi-LoRA: a step's groups as flat arrays, made once, and one call per fused linear."""

import ctypes
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.adapter_parts import AdapterParts, OutputVector, PartsUse
from loraplex.kernels.lora import LoraBatch, LoraCells, LoraPlace
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
    Value,
)
from loraplex.kernels.routing import Routes


class _LoraStep(ctypes.Structure):
    """loraplex_lora_step"""

    _fields_ = (
        ("pages", Pointer),
        ("offsets", Pointer),
        ("ranks", Pointer),
        ("scales", Pointer),
        ("num_layers", Size),
        ("num_modules", Size),
        ("num_groups", Size),
        ("group_entries", Pointer),
        ("group_starts", Pointer),
        ("token_indices", Pointer),
        ("token_scales", Pointer),
        ("num_waves", Size),
        ("wave_starts", Pointer),
        ("pages_dtype", Int),
        ("vector_starts", Pointer),
        ("vectors", Pointer),
    )


class _FusedLinear(ctypes.Structure):
    """loraplex_lora_linear"""

    _fields_ = (
        ("in_features", Size),
        ("num_blocks", Size),
        ("num_modules", Size),
        ("modules", Pointer),
        ("out_offsets", Pointer),
        ("out_features", Pointer),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """A C structure and what it points into."""

    address: int
    structure: ctypes.Structure
    arrays: tuple[Any, ...]


_NUM_TOKEN_FIELDS = 3
"""First fields of loraplex_output_vector, which depend on the step. All fields have 8 bytes."""


class _Vectors(NamedTuple):
    """Vectors of adapters, as loraplex_output_vector."""

    cells: npt.NDArray[np.int64]  # [n]
    fields: npt.NDArray[np.int64]  # [n, 7]


_LAYER = 0
"""The kernel gets flat cells: to it, a table has one layer with all of them as modules."""


class NativeLora:
    """Remembers the last step it saw, and all linear layers: their structures are made once."""

    def __init__(
        self, library: NativeLibrary, pool: ThreadPool, channel: int | None = None
    ) -> None:
        """channel: the address of a loraplex_channel, over which row layers are added."""
        self._pool = pool
        self._channel = channel
        self._add = library.function(
            "loraplex_add_lora",
            *(Pointer, Value, Pointer, Size, Int, Value, Size),
            *(Pointer, Value, Size),
        )
        self._add_experts = library.function(
            "loraplex_add_expert_lora",
            *(Pointer, Value, Pointer, Size, Size, Size, Value),
            *(Int, Value, Size, Size),
            *(Pointer, Value, Size),
        )
        self._batch: LoraBatch | None = None
        self._step: _Prepared
        self._linears: dict[tuple[LoraCells, LoraPlace], _Prepared] = {}
        self._places: weakref.WeakKeyDictionary[AdapterParts, dict[LoraCells, _Vectors]] = (
            weakref.WeakKeyDictionary()
        )
        """Vectors of adapters that were in a step, without tokens."""

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        place: LoraPlace,
    ) -> None:
        """Implement kernels.lora.add_lora."""
        self._add(
            *(self._pool.address, self.step_address(batch)),
            self._linear_address(batch.table.cells, place),
            *(_LAYER, DTYPES[x.dtype], x.data_ptr(), x.stride(0)),
            self._channel if place.num_blocks else None,
            *(y.data_ptr(), y.stride(0)),
        )

    def add_experts(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        routes: Routes,
        place: LoraPlace,
    ) -> None:
        """Implement kernels.routing.add_expert_lora. The cells are those of the first expert."""
        cells = batch.table.cells
        num_experts = cells.num_experts[place.layer]
        assert all(num_experts[module] == routes.num_experts for module in place.modules)
        self._add_experts(
            *(self._pool.address, self.step_address(batch)),
            self._linear_address(cells, place),
            *(_LAYER, routes.num_experts, routes.num_chosen, routes.experts.data_ptr()),
            *(DTYPES[x.dtype], x.data_ptr(), x.stride(0)),
            routes.num_chosen if len(x) < len(y) else 1,
            self._channel if place.num_blocks else None,
            *(y.data_ptr(), y.stride(0)),
        )

    def step_address(self, batch: LoraBatch) -> int:
        """Return the address of the batch's structure; valid until the next batch."""
        if batch is not self._batch:
            self._step = _step(batch, self._vectors(batch.parts, batch.table.cells))
            self._batch = batch
        return self._step.address

    def _vectors(self, uses: Sequence[PartsUse], cells: LoraCells) -> _Vectors | None:
        """Return the vectors of a step by cell; None if no adapter has some."""
        if not uses:
            return None
        found = [self._vectors_of(use.parts, cells) for use in uses]
        numbers = np.concatenate([vectors.cells for vectors in found])
        fields = np.concatenate([vectors.fields for vectors in found])
        tokens = [
            (len(use.token_indices), use.token_indices.data_ptr(), use.token_scales.data_ptr())
            for use in uses
        ]
        fields[:, :_NUM_TOKEN_FIELDS] = np.repeat(tokens, [len(v.cells) for v in found], axis=0)
        # The vectors of one cell stay in the order of their adapters.
        order = np.argsort(numbers, kind="stable")
        return _Vectors(numbers[order], fields[order])

    def _vectors_of(self, parts: AdapterParts, cells: LoraCells) -> _Vectors:
        places = self._places.setdefault(parts, {})
        if cells not in places:
            places[cells] = _vectors(parts, cells)
        return places[cells]

    def _linear_address(self, cells: LoraCells, place: LoraPlace) -> int:
        """Return the address of the structure of a fused linear layer; it stays valid."""
        linear = self._linears.get((cells, place))
        if linear is None:
            linear = self._linears[cells, place] = _linear(cells, place)
        return linear.address


def _linear(cells: LoraCells, place: LoraPlace) -> _Prepared:
    indices = [cells.by_place[place.layer, module, 0] for module in place.modules]
    in_features = {cells.shapes[index][0] for index in indices}
    assert len(in_features) == 1, "modules of one linear layer have one input"
    arrays = (
        np.array(indices, dtype=np.int64),
        np.array(place.out_offsets, dtype=np.int64),
        np.array([cells.shapes[index][1] for index in indices], dtype=np.int64),
    )
    addresses = (array.ctypes.data for array in arrays)
    linear = _FusedLinear(in_features.pop(), max(1, place.num_blocks), len(indices), *addresses)
    return _Prepared(ctypes.addressof(linear), linear, arrays)


def _vectors(parts: AdapterParts, cells: LoraCells) -> _Vectors:
    """Return an adapter's vectors without their tokens, those of cells only."""
    found = [
        (cells.by_place[(*place, 0)], vector)
        for place, vectors in parts.vectors.items()
        if place in cells
        for vector in vectors
    ]
    fields = [(0, 0, 0, vector.first, vector.size, *_addresses(vector)) for _, vector in found]
    numbers = np.array([cell for cell, _ in found], np.int64)
    return _Vectors(numbers, np.array(fields, np.int64).reshape(-1, 7))


def _addresses(vector: OutputVector) -> tuple[int, int]:
    factor, shift = (
        0 if values is None else values.data_ptr() for values in (vector.factor, vector.shift)
    )
    return factor, shift


def _step(batch: LoraBatch, vectors: _Vectors | None) -> _Prepared:
    table = batch.table
    arrays = (table.offsets, table.ranks, table.scales)
    groups = (batch.entries, batch.group_starts, batch.wave_starts)
    tokens = (batch.token_indices, batch.token_scales)
    assert all(array.flags.c_contiguous for array in (*arrays, *groups))
    assert all(values.is_contiguous() for values in tokens)
    offsets, ranks, scales = (array.ctypes.data for array in arrays)
    starts = None
    if vectors is not None:
        starts = np.searchsorted(vectors.cells, np.arange(len(table.cells) + 1))
    entries, group_starts, wave_starts = (array.ctypes.data for array in groups)
    step = _LoraStep(
        pages=batch.pool.data_ptr(),
        offsets=offsets,
        ranks=ranks,
        scales=scales,
        num_layers=1,
        num_modules=len(table.cells),
        num_groups=len(batch.entries),
        group_entries=entries,
        group_starts=group_starts,
        token_indices=batch.token_indices.data_ptr(),
        token_scales=batch.token_scales.data_ptr(),
        num_waves=len(batch.wave_starts) - 1,
        wave_starts=wave_starts,
        pages_dtype=DTYPES[batch.pool.dtype],
        vector_starts=None if starts is None else starts.ctypes.data,
        vectors=None if vectors is None else vectors.fields.ctypes.data,
    )
    return _Prepared(ctypes.addressof(step), step, (batch, starts, vectors))
