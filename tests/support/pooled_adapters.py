"""Random adapters in a pool as kernels read it, and what they give, worked out in float64."""

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.adapter_parts import FLAGS, MAX_VECTORS
from loraplex.kernels.lora import (
    DeviceLoraTable,
    LoraBatch,
    LoraCells,
    LoraTable,
    LoraUse,
    lora_batch,
    lora_segments,
)
from loraplex.kernels.routing import Routes

BASE = -1
"""Placeholder for no adapter."""


def users(popularity: str, num_tokens: int) -> list[int]:
    """The adapter of each token. "skewed": half of them one adapter, a few the base model."""
    match popularity:
        case "distinct":
            return list(range(num_tokens))
        case "identical":
            return [0] * num_tokens
        case "skewed":
            return [
                BASE if token % 5 == 4 else (0 if token % 2 else 1 + token // 4)
                for token in range(num_tokens)
            ]
    raise ValueError(popularity)


def token_uses(adapters: Sequence[int], wave: int = 0) -> list[LoraUse]:
    """Each token's adapter, with a scale of its own."""
    return [
        LoraUse(wave, adapter, token, 1, 0.5 + token % 3)
        for token, adapter in enumerate(adapters)
        if adapter != BASE
    ]


class PooledAdapters:
    """Adapter a has rank ranks[(a + layer + module) % len(ranks)]; what is not theirs is NaN."""

    def __init__(
        self,
        num_adapters: int,
        ranks: Sequence[int],
        shapes: Mapping[str, tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        num_layers: int = 2,
        alignment: int = 1,
        num_experts: Mapping[str, int] | None = None,
    ) -> None:
        """shapes: (in_features, out_features) of each module. num_experts: by module.

        An expert counts as a module of its own.
        """
        cells = LoraCells([shapes] * num_layers, [num_experts or {}] * num_layers)
        table = _table(num_adapters, ranks, cells, alignment)
        sizes = table.ranks * np.array([sum(shape) for shape in table.cells.shapes])
        pool = torch.full((int((table.offsets + sizes).max()),), torch.nan)
        pool = pool.to(device or "cpu", dtype)
        for offset, size in zip(table.offsets.flat, sizes.flat, strict=True):
            pool[offset : offset + size].normal_(std=_deviation(shapes))
        self.pool = pool
        self.table = table
        on_device = DeviceLoraTable(
            torch.from_numpy(table.offsets).to(pool.device),
            torch.from_numpy(table.ranks).to(pool.device),
            torch.from_numpy(table.scales).to(pool.device),
            torch.from_numpy(self._vectors).to(pool.device),
        )
        self.table = dataclasses.replace(table, on_device=on_device)

    def with_vectors(self, place: tuple[int, str], *kinds: int) -> "PooledAdapters":
        """Return the same adapters, with vectors of these FACTOR and SHIFT flags at a place."""
        cell = self.table.cells.by_place[(*place, 0)]
        out_features = self.table.cells.shapes[cell][1]
        unit = self.table.alignment
        words, pools = self._vectors.copy(), [self.pool]
        for entry, (number, flags) in itertools.product(range(len(words)), enumerate(kinds)):
            pools.append(self.pool.new_empty(-sum(map(len, pools)) % unit))
            words[entry, cell, number] = sum(map(len, pools)) // unit * FLAGS + flags
            pools.append(torch.randn(2 * out_features).to(self.pool))
        made = copy.copy(self)
        made.pool = torch.cat(pools)
        assert self.table.on_device is not None
        sent = torch.from_numpy(words).to(self.pool.device)
        on_device = dataclasses.replace(self.table.on_device, vectors=sent)
        made.table = dataclasses.replace(self.table, vectors=words, on_device=on_device)
        return made

    @property
    def _vectors(self) -> npt.NDArray[np.int32]:
        shape = (*self.table.ranks.shape, MAX_VECTORS)
        return np.zeros(shape, np.int32) if self.table.vectors is None else self.table.vectors

    def batch(
        self, uses: Sequence[LoraUse], num_tokens: int, longest: int | None = None
    ) -> LoraBatch:
        """Return the batch with its segments, on the pool's device."""
        host = lora_batch(self.pool, self.table, uses, torch.device("cpu"))
        segments = lora_segments(host, num_tokens, longest)
        segments = segments.at(segments.packed.to(self.pool.device))
        return dataclasses.replace(
            host,
            segments=segments,
            token_indices=host.token_indices.to(self.pool.device),
            token_scales=host.token_scales.to(self.pool.device),
        )

    def expected(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        uses: Sequence[LoraUse],
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
    ) -> torch.Tensor:
        """What becomes of y, in float64."""
        result, x = y.double(), x.double()
        for use, (module, first) in itertools.product(uses, zip(modules, out_offsets, strict=True)):
            cell = self.table.cells.by_place[layer, module, 0]
            tokens = slice(use.first_token, use.first_token + use.num_tokens)
            a, b = self._matrices(use.entry, cell)
            scale = use.scale * float(self.table.scales[use.entry, cell])
            outputs = slice(first, first + b.shape[1])
            result[tokens, outputs] += scale * (x[tokens] @ a.t()) @ b
        return result

    def expected_of_experts(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        uses: Sequence[LoraUse],
        routes: Routes,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
    ) -> torch.Tensor:
        """What becomes of y [T * k, out], in float64."""
        result, x = y.double(), x.double()
        pairs_of_row = len(y) // len(x)
        for use, (module, first) in itertools.product(uses, zip(modules, out_offsets, strict=True)):
            tokens = range(use.first_token, use.first_token + use.num_tokens)
            for token, choice in itertools.product(tokens, range(routes.num_chosen)):
                expert, pair = (
                    int(routes.experts[token, choice]),
                    token * routes.num_chosen + choice,
                )
                cell = self.table.cells.by_place[layer, module, expert]
                a, b = self._matrices(use.entry, cell)
                scale = use.scale * float(self.table.scales[use.entry, cell])
                row = x[pair // pairs_of_row]
                result[pair, first : first + b.shape[1]] += scale * (row @ a.t()) @ b
        return result

    def _matrices(self, entry: int, cell: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in], B transposed [rank, out], float64."""
        in_features, out_features = self.table.cells.shapes[cell]
        rank = int(self.table.ranks[entry, cell])
        start = int(self.table.offsets[entry, cell])
        middle, end = start + rank * in_features, start + rank * (in_features + out_features)
        a, b = self.pool[start:middle].double(), self.pool[middle:end].double()
        return a.view(rank, in_features), b.view(rank, out_features)


def _deviation(shapes: Mapping[str, tuple[int, int]]) -> float:
    """So that what is added is about as large as 1."""
    return float(max(in_features for in_features, _ in shapes.values()) ** -0.5)


def _table(num_adapters: int, ranks: Sequence[int], cells: LoraCells, alignment: int) -> LoraTable:
    num_layers = len(cells.layers)
    shape = (num_adapters, len(cells))
    places = (num_adapters, num_layers, len(cells) // num_layers)
    numbers = np.indices(places).sum(axis=0).reshape(shape)
    table_ranks = np.array(ranks, np.int32)[numbers % len(ranks)]
    sizes = table_ranks * np.array([sum(features) for features in cells.shapes])
    sizes = (sizes + 3 * alignment) // alignment * alignment
    offsets = sizes.cumsum().reshape(shape) - sizes + 7 * alignment
    scales = (0.25 + 0.5 * (numbers % 4)).astype(np.float32)
    return LoraTable(cells, offsets, table_ranks, scales, alignment=alignment, max_rank=max(ranks))
