"""Native multi-LoRA: a step's groups as flat arrays, made once, and one call per fused linear."""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from loraplex.kernels.adapter_parts import add_vectors
from loraplex.kernels.lora import LoraBatch, LoraCells
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
    Value,
)


class _Step(ctypes.Structure):
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
    )


class _Linear(ctypes.Structure):
    """loraplex_lora_linear"""

    _fields_ = (
        ("in_features", Size),
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


_LinearKey = tuple[LoraCells, int, tuple[str, ...], tuple[int, ...]]
"""Cells of a table; the layer, its fused modules, and the offsets of their outputs."""

_LAYER = 0
"""The kernel gets flat cells: to it, a table has one layer with all of them as modules."""


class LoraKernel:
    """Remembers the last step it saw, and all linear layers: their structures are made once."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._add = library.function(
            "loraplex_add_lora",
            *(Pointer, Value, Pointer, Size, Int, Value, Size, Value, Size),
        )
        self._batch: LoraBatch | None = None
        self._step: _Prepared
        self._linears: dict[_LinearKey, _Prepared] = {}

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
    ) -> None:
        """Implement kernels.lora.add_lora."""
        if batch.parts:
            add_vectors(y, batch.parts, layer, modules, out_offsets)
        self._add(
            self._pool.address,
            self.step_address(batch),
            self._linear_address(batch.table.cells, layer, tuple(modules), tuple(out_offsets)),
            _LAYER,
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
        )

    def step_address(self, batch: LoraBatch) -> int:
        """Return the address of the batch's structure; valid until the next batch."""
        if batch is not self._batch:
            self._step = _step(batch)
            self._batch = batch
        return self._step.address

    def _linear_address(
        self, cells: LoraCells, layer: int, modules: tuple[str, ...], out_offsets: tuple[int, ...]
    ) -> int:
        """Return the address of the structure of a fused linear layer; it stays valid."""
        key = (cells, layer, modules, out_offsets)
        linear = self._linears.get(key)
        if linear is None:
            linear = self._linears[key] = _linear(*key)
        return linear.address


def _linear(
    cells: LoraCells, layer: int, modules: tuple[str, ...], out_offsets: tuple[int, ...]
) -> _Prepared:
    indices = [cells.cell_of(layer, module) for module in modules]
    in_features = {cells.shapes[index][0] for index in indices}
    assert len(in_features) == 1, "modules of one linear layer have one input"
    arrays = (
        np.array(indices, dtype=np.int64),
        np.array(out_offsets, dtype=np.int64),
        np.array([cells.shapes[index][1] for index in indices], dtype=np.int64),
    )
    addresses = (array.ctypes.data for array in arrays)
    linear = _Linear(in_features.pop(), len(indices), *addresses)
    return _Prepared(ctypes.addressof(linear), linear, arrays)


def _step(batch: LoraBatch) -> _Prepared:
    table = batch.table
    arrays = (table.offsets, table.ranks, table.scales)
    groups = (batch.entries, batch.group_starts, batch.wave_starts)
    tokens = (batch.token_indices, batch.token_scales)
    assert all(array.flags.c_contiguous for array in (*arrays, *groups))
    assert all(values.is_contiguous() for values in tokens)
    offsets, ranks, scales = (array.ctypes.data for array in arrays)
    entries, group_starts, wave_starts = (array.ctypes.data for array in groups)
    step = _Step(
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
    )
    return _Prepared(ctypes.addressof(step), step, (batch,))
