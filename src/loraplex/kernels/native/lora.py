"""Native multi-LoRA: a step's groups as flat arrays, made once, and one call per fused linear."""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from loraplex.kernels.lora import LoraBatch, LoraGroup, LoraTable
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
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


class LoraKernel:
    """Remembers the last step it saw and the linear layers of its table: both are made once."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._add = library.function(
            "loraplex_add_lora",
            *(Pointer, Pointer, Pointer, Size, Int, Pointer, Size, Pointer, Size),
        )
        self._batch: LoraBatch | None = None
        self._step: _Prepared
        self._table: LoraTable | None = None
        self._linears: dict[tuple[tuple[str, ...], tuple[int, ...]], _Prepared] = {}

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
    ) -> None:
        """As kernels.lora.add_lora."""
        if not batch.groups:
            return
        if batch is not self._batch:
            self._prepare(batch)
        linear = self._linears.get((tuple(modules), tuple(out_offsets)))
        if linear is None:
            linear = self._prepare_linear(batch.table, tuple(modules), tuple(out_offsets))
        self._add(
            self._pool.address,
            self._step.address,
            linear.address,
            layer,
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
        )

    def _prepare(self, batch: LoraBatch) -> None:
        if batch.table is not self._table:
            self._linears.clear()
            self._table = batch.table
        self._step = _step(batch)
        self._batch = batch

    def _prepare_linear(
        self, table: LoraTable, modules: tuple[str, ...], out_offsets: tuple[int, ...]
    ) -> _Prepared:
        indices = [table.modules.index(module) for module in modules]
        in_features = {table.shapes[index][0] for index in indices}
        assert len(in_features) == 1, "modules of one linear layer have one input"
        arrays = (
            np.array(indices, dtype=np.int64),
            np.array(out_offsets, dtype=np.int64),
            np.array([table.shapes[index][1] for index in indices], dtype=np.int64),
        )
        addresses = (array.ctypes.data for array in arrays)
        linear = _Linear(in_features.pop(), len(indices), *addresses)
        prepared = _Prepared(ctypes.addressof(linear), linear, arrays)
        self._linears[modules, out_offsets] = prepared
        return prepared


def _step(batch: LoraBatch) -> _Prepared:
    table, groups = batch.table, batch.groups
    entries = np.array([group.entry for group in groups], dtype=np.int64)
    starts = np.cumsum([0, *(len(group.token_indices) for group in groups)], dtype=np.int64)
    indices = np.concatenate([group.token_indices.numpy() for group in groups])
    scales = np.concatenate([group.token_scales.numpy() for group in groups])
    waves = np.array(wave_starts(groups), dtype=np.int64)
    assert indices.dtype == np.int64
    assert scales.dtype == np.float32
    assert all(a.flags.c_contiguous for a in (table.offsets, table.ranks, table.scales))
    step = _Step(
        pages=batch.pool.data_ptr(),
        offsets=table.offsets.ctypes.data,
        ranks=table.ranks.ctypes.data,
        scales=table.scales.ctypes.data,
        num_layers=table.ranks.shape[1],
        num_modules=table.ranks.shape[2],
        num_groups=len(groups),
        group_entries=entries.ctypes.data,
        group_starts=starts.ctypes.data,
        token_indices=indices.ctypes.data,
        token_scales=scales.ctypes.data,
        num_waves=len(waves) - 1,
        wave_starts=waves.ctypes.data,
        pages_dtype=DTYPES[batch.pool.dtype],
    )
    arrays = (batch, entries, starts, indices, scales, waves)
    return _Prepared(ctypes.addressof(step), step, arrays)


def wave_starts(groups: Sequence[LoraGroup]) -> list[int]:
    """First group of each wave, and the number of groups: in a wave a token occurs once."""
    starts = [0]
    seen: set[int] = set()
    for index, group in enumerate(groups):
        tokens = group.token_indices.tolist()
        if not seen.isdisjoint(tokens):
            starts.append(index)
            seen.clear()
        seen.update(tokens)
    return [*starts, len(groups)]
