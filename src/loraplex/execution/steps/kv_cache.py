"""Tensors of the KV blocks: one storage per layer, on the device and on the host."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from loraplex.core.plan import BlockCopy, BlockId, BlockTransfer, CacheGroupCapacity, CacheGroupId
from loraplex.execution.steps.kv_transfers import KVTransfers
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.host_memory import zeroed
from loraplex.kernels.ops import AttentionShape, Kernels, Storage
from loraplex.models.cache_groups import CacheGroup

_Pairs = Sequence[tuple[BlockId, BlockId]]
"""(block of the source, block of the target)"""


class KVCache:
    """Storage by cache group and block id. The pools (memory) know the blocks' owners and contents.

    On an accelerator blocks move in the order of the compute queue, as everything that reads them.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        capacities: Sequence[CacheGroupCapacity],
        shapes: Sequence[AttentionShape | None],
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        accelerator: Accelerator | None = None,
    ) -> None:
        """capacities: of each group. shapes: of each layer; None: it keeps nothing.

        dtype: of stored keys and values, which may not be the model's.
        """
        self._layers = [group.layers for group in groups]
        size_of = {
            layer: capacity
            for layers, capacity in zip(self._layers, capacities, strict=True)
            for layer in layers
        }
        # The steps that read it do not wait for work in other queues.
        with nullcontext() if accelerator is None else accelerator.compute():
            self.storages: tuple[Storage | None, ...] = tuple(
                None
                if shape is None
                else kernels.allocate_kv(size_of[layer].num_blocks, shape, dtype)
                for layer, shape in enumerate(shapes)
            )
        self._transfers: tuple[KVTransfers, ...] = ()
        """Transfers of each group, where there is an accelerator."""
        self.host_storages: tuple[Storage | None, ...] = ()
        """Blocks of the same form as the device's; none where there is an accelerator."""
        if accelerator is not None:
            self._transfers = tuple(
                KVTransfers(
                    accelerator, _of_layers(self.storages, layers), capacity.num_host_blocks
                )
                for layers, capacity in zip(self._layers, capacities, strict=True)
            )
        else:
            self.host_storages = tuple(
                None if storage is None else _on_host(storage, size_of[layer].num_host_blocks)
                for layer, storage in enumerate(self.storages)
            )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(storage.num_bytes for storage in self.storages if storage is not None)

    def offload_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks from the device to the host."""
        pairs_of = _by_group(
            (each.cache_group, each.device_block, each.host_block) for each in transfers
        )
        for group, pairs in pairs_of.items():
            if self._transfers:
                self._transfers[group].offload(pairs)
            else:
                self._copy(group, self.storages, self.host_storages, pairs)

    def load_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks from the host to the device."""
        pairs_of = _by_group(
            (each.cache_group, each.host_block, each.device_block) for each in transfers
        )
        for group, pairs in pairs_of.items():
            if self._transfers:
                self._transfers[group].load(pairs)
            else:
                self._copy(group, self.host_storages, self.storages, pairs)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks all at once: every source is read before any target is written."""
        pairs_of = _by_group((each.cache_group, each.source, each.target) for each in copies)
        for group, pairs in pairs_of.items():
            if self._transfers:
                self._transfers[group].copy(pairs)
            else:
                self._copy(group, self.storages, self.storages, pairs)

    def _copy(
        self,
        group: CacheGroupId,
        sources: Sequence[Storage | None],
        targets: Sequence[Storage | None],
        pairs: _Pairs,
    ) -> None:
        layers = self._layers[group]
        for source, target in zip(
            _of_layers(sources, layers), _of_layers(targets, layers), strict=True
        ):
            for source_tensor, target_tensor in zip(source.tensors, target.tensors, strict=True):
                _copy_tensor(source_tensor, target_tensor, pairs)


def _of_layers(storages: Sequence[Storage | None], layers: Sequence[int]) -> list[Storage]:
    """Return the storages of a group's layers, which all have one."""
    return [storage for layer in layers if (storage := storages[layer]) is not None]


def _by_group(
    moves: Iterable[tuple[CacheGroupId, BlockId, BlockId]],
) -> Mapping[CacheGroupId, _Pairs]:
    pairs: dict[CacheGroupId, list[tuple[BlockId, BlockId]]] = {}
    for group, source, target in moves:
        pairs.setdefault(group, []).append((source, target))
    return pairs


def _on_host(storage: Storage, num_blocks: int) -> Storage:
    """Allocate blocks like those of the storage."""
    return Storage(
        tuple(zeroed((num_blocks, *tensor.shape[1:]), tensor.dtype) for tensor in storage.tensors)
    )


def _copy_tensor(source: torch.Tensor, target: torch.Tensor, pairs: _Pairs) -> None:
    if source.device == target.device:
        indices = torch.tensor(pairs, device=source.device)
        target[indices[:, 1]] = source[indices[:, 0]]
        return
    for from_block, to_block in pairs:
        target[to_block].copy_(source[from_block])
