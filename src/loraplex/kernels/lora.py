"""The low-rank part of a linear layer: y += scale * (x A^T) B^T, for many adapters in one batch.

Owns the data layout that such an op reads (`LoraTable`, `LoraGroup`, `LoraBatch`) and its torch
reference. Does not know where an adapter came from, nor who decides what is in the pool.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

_HOST_TILE_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class LoraTable:
    """Where the adapters' matrices are in the pool. Fixed shape, on the host, written in place.

    One entry per adapter in the pool; rank 0 means that the adapter leaves the module alone. At
    `offsets[e, l, m]` lies A [rank, in_features], row-major; B transposed, [rank, out_features],
    row-major, follows it at once.
    """

    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    """(in_features, out_features) of each module."""
    offsets: npt.NDArray[np.int64]  # [entries, layers, modules], in elements
    ranks: npt.NDArray[np.int32]  # [entries, layers, modules]
    scales: npt.NDArray[np.float32]  # [entries, layers, modules], the adapter's own scale


@dataclasses.dataclass(frozen=True, slots=True)
class LoraGroup:
    """The tokens of one step that one adapter applies to. A token occurs once in a group."""

    entry: int
    """Row of the LoraTable."""
    token_indices: torch.Tensor  # [n] int64, on the device
    token_scales: torch.Tensor  # [n] float32, on the device: the requests' scales


@dataclasses.dataclass(frozen=True, slots=True)
class LoraBatch:
    """The adapters of one step. Built once (AdapterBank.lora_batch), used by every layer.

    The groups are in the order of the rows' own adapter lists: every row's first adapters, then
    every row's second ones. So the order of a row's sums does not depend on the other rows.
    """

    pool: torch.Tensor  # [num_pages * page_elements]
    table: LoraTable
    groups: tuple[LoraGroup, ...]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    batch: LoraBatch,
    layer: int,
    modules: Sequence[str],
    out_offsets: Sequence[int],
) -> None:
    """Add what the adapters of the batch give for fused linear layers to y, in place.

    y: [num_tokens, sum of out_features], x: [num_tokens, in_features]. Module i writes the columns
    from out_offsets[i] on (its own out_features of them): for a fused q/k/v projection
    modules = ("q_proj", "k_proj", "v_proj"), out_offsets = (0, q_size, q_size + kv_size). A module
    that an adapter does not adapt is left alone. Sums are float32 whatever the dtypes; the scale
    is applied to x A^T.
    """
    wanted = [
        (batch.table.modules.index(module), first)
        for module, first in zip(modules, out_offsets, strict=True)
    ]
    for group in batch.groups:
        ranks = batch.table.ranks[group.entry, layer]
        adapted = [(module, first) for module, first in wanted if ranks[module] > 0]
        if not adapted:
            continue
        inputs = x[group.token_indices].float()
        for module, first in adapted:
            delta = _delta(inputs, batch, group, layer, module)
            columns = y[:, first : first + delta.shape[1]]
            summed = columns[group.token_indices].float() + delta
            columns[group.token_indices] = summed.to(y.dtype)


def _delta(
    inputs: torch.Tensor, batch: LoraBatch, group: LoraGroup, layer: int, module: int
) -> torch.Tensor:
    """What one adapter adds for its tokens: float32 [n, out_features]."""
    table = batch.table
    in_features, out_features = table.shapes[module]
    place = (group.entry, layer, module)
    rank, offset = int(table.ranks[place]), int(table.offsets[place])
    middle = offset + rank * in_features
    a = batch.pool[offset:middle].view(rank, in_features).float()
    b = batch.pool[middle : middle + rank * out_features].view(rank, out_features).float()
    scales = (group.token_scales * float(table.scales[place])).unsqueeze(1)
    tiles = [
        torch.mm(torch.mm(tile, a.t()) * tile_scales, b)
        for tile, tile_scales in zip(_tiles(inputs), _tiles(scales), strict=True)
    ]
    return torch.cat(tiles)[: len(inputs)]


def _tiles(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """On the host, tiles of one fixed number of rows, the last one padded with zeros.

    A host matmul chooses its order of summation by the number of rows; with tiles, a token's bits
    do not depend on how many others share its adapter. A device takes all rows at once.
    """
    if values.device.type != "cpu":
        yield values
        return
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % _HOST_TILE_TOKENS))
    yield from padded.view(-1, _HOST_TILE_TOKENS, values.shape[1]).unbind(0)
