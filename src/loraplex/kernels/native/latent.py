"""Native latent attention, and LoRA of the layer that it takes apart (loraplex/latent.h)."""

import ctypes
from collections.abc import Callable

import torch

from loraplex.kernels.latent import HeadsPlace
from loraplex.kernels.lora import LoraBatch, LoraCells
from loraplex.kernels.native.attention import NativeAttentionPlan
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
    Value,
)
from loraplex.kernels.ops import AttentionPlan, Storage


class _HeadsPlace(ctypes.Structure):
    """loraplex_heads_place"""

    _fields_ = (
        ("module", Size),
        ("num_heads", Size),
        ("key_size", Size),
        ("value_size", Size),
        ("latent_size", Size),
        ("is_of_keys", Size),
    )


class NativeLatent:
    """Remembers the places of adapters: their structures are made once."""

    def __init__(
        self, library: NativeLibrary, pool: ThreadPool, lora_step: Callable[[LoraBatch], int]
    ) -> None:
        """lora_step: returns the address of a batch's structure."""
        self._pool = pool
        self._output = library.output
        self._lora_step = lora_step
        self._places: dict[tuple[LoraCells, HeadsPlace], _HeadsPlace] = {}
        self._write = library.function(
            "loraplex_write_latent",
            *(Pointer, Size, Size, Size, Value, Int),
            *(Value, Size, Value, Size, Int, Pointer),
        )
        self._attend = library.function(
            "loraplex_latent_attention",
            *(Pointer, Value, Size, Int, Pointer, Int),
            *(Value, Value, Size, Size, Value),
        )
        self._add_lora = library.function(
            "loraplex_add_heads_lora", *(Pointer, Value, Pointer, Int, Value, Size, Size, Value)
        )
        self._scale = library.function(
            "loraplex_scale_heads", *(Pointer, Value, Pointer, Size, Int, Value, Size, Size, Value)
        )

    def write(
        self,
        storage: Storage,
        latent: torch.Tensor,
        key: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """latent [T, L], key [T, R]; slot_mapping [T] int64."""
        (stored,) = storage.tensors
        self._write(
            *(self._pool.address, len(latent), latent.shape[1], key.shape[1]),
            *(slot_mapping.data_ptr(), DTYPES[latent.dtype]),
            *(latent.data_ptr(), latent.stride(0), key.data_ptr(), key.stride(0)),
            *(DTYPES[stored.dtype], stored.data_ptr()),
        )

    def attend(
        self,
        query: torch.Tensor,
        query_key: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """query [T, H, L], contiguous, query_key [T, H, R] -> [T, H, L]."""
        assert isinstance(plan, NativeAttentionPlan)
        (stored,) = storage.tensors
        output = self._output(query.shape, query.dtype)
        self._attend(
            *(self._pool.address, plan.address, query.shape[2]),
            *(DTYPES[stored.dtype], stored.data_ptr(), DTYPES[query.dtype]),
            *(query.data_ptr(), query_key.data_ptr(), *query_key.stride()[:2]),
            output.data_ptr(),
        )
        return output

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, batch: LoraBatch, place: HeadsPlace
    ) -> None:
        """x [T, H, in], y [T, H, out], contiguous."""
        self._add_lora(
            *(self._pool.address, self._lora_step(batch), self._address(batch, place)),
            *(DTYPES[x.dtype], x.data_ptr(), *x.stride()[:2], y.data_ptr()),
        )

    def scale(self, x: torch.Tensor, batch: LoraBatch, place: HeadsPlace) -> torch.Tensor:
        """x [T, H, size] -> the same shape, contiguous."""
        output = self._output(x.shape, x.dtype)
        self._scale(
            *(self._pool.address, self._lora_step(batch), self._address(batch, place), len(x)),
            *(DTYPES[x.dtype], x.data_ptr(), *x.stride()[:2], output.data_ptr()),
        )
        return output

    def _address(self, batch: LoraBatch, place: HeadsPlace) -> int:
        """Return the address of a place's structure; it stays valid."""
        cells = batch.table.cells
        made = self._places.get((cells, place))
        if made is None:
            cell = cells.by_place[place.layer, place.module, 0]
            made = self._places[cells, place] = _HeadsPlace(
                *(cell, place.num_heads, place.key_size, place.value_size),
                *(cells.shapes[cell][0], place.is_of_keys),
            )
        return ctypes.addressof(made)
