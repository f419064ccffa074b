"""Tensors of the KV blocks: one storage per layer, on the device and on the host."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from loraplex.core.plan import BlockCopy, BlockId, BlockTransfer, KVGroupCapacity, KVGroupId
from loraplex.execution.steps.kv_transfers import KVTransfers
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.host_memory import zeroed
from loraplex.kernels.ops import AttentionShape, Kernels, KVStorage
from loraplex.models.kv_groups import KVGroup

_Pairs = Sequence[tuple[BlockId, BlockId]]
"""(block of the source, block of the target)"""


class KVCache:
    """KV storage by KV group and block id. The pools (memory) know the blocks' owners and contents.

    On an accelerator blocks move in the order of the compute queue, as everything that reads them.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        capacities: Sequence[KVGroupCapacity],
        shapes: Sequence[AttentionShape],
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        accelerator: Accelerator | None = None,
    ) -> None:
        """capacities: of each group. shapes: of each layer.

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
            self.storages: tuple[KVStorage, ...] = tuple(
                kernels.allocate_kv(size_of[layer].num_blocks, shape, dtype)
                for layer, shape in enumerate(shapes)
            )
        self._transfers: list[KVTransfers] = []
        """Transfers of each group, where there is an accelerator."""
        self.host_storages: tuple[KVStorage, ...] = ()
        """Blocks of the same form as the device's; none where there is an accelerator."""
        if accelerator is not None:
            self._transfers = [
                KVTransfers(
                    accelerator,
                    [self.storages[layer] for layer in layers],
                    capacity.num_host_blocks,
                )
                for layers, capacity in zip(self._layers, capacities, strict=True)
            ]
        else:
            self.host_storages = tuple(
                _on_host(storage, size_of[layer].num_host_blocks)
                for layer, storage in enumerate(self.storages)
            )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(storage.num_bytes for storage in self.storages)

    def offload_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks from the device to the host."""
        pairs_of = _by_group(
            (each.kv_group, each.device_block, each.host_block) for each in transfers
        )
        for group, pairs in pairs_of.items():
            if self._transfers:
                self._transfers[group].offload(pairs)
            else:
                self._copy(group, self.storages, self.host_storages, pairs)

    def load_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks from the host to the device."""
        pairs_of = _by_group(
            (each.kv_group, each.host_block, each.device_block) for each in transfers
        )
        for group, pairs in pairs_of.items():
            if self._transfers:
                self._transfers[group].load(pairs)
            else:
                self._copy(group, self.host_storages, self.storages, pairs)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks all at once: every source is read before any target is written."""
        pairs_of = _by_group((each.kv_group, each.source, each.target) for each in copies)
        for group, pairs in pairs_of.items():
            if self._transfers:
                self._transfers[group].copy(pairs)
            else:
                self._copy(group, self.storages, self.storages, pairs)

    def _copy(
        self,
        group: KVGroupId,
        sources: Sequence[KVStorage],
        targets: Sequence[KVStorage],
        pairs: _Pairs,
    ) -> None:
        for layer in self._layers[group]:
            _copy_tensor(sources[layer].key, targets[layer].key, pairs)
            _copy_tensor(sources[layer].value, targets[layer].value, pairs)


def _by_group(
    moves: Iterable[tuple[KVGroupId, BlockId, BlockId]],
) -> Mapping[KVGroupId, _Pairs]:
    pairs: dict[KVGroupId, list[tuple[BlockId, BlockId]]] = {}
    for group, source, target in moves:
        pairs.setdefault(group, []).append((source, target))
    return pairs


def _on_host(storage: KVStorage, num_blocks: int) -> KVStorage:
    """Allocate blocks like those of the storage."""
    key, value = (
        zeroed((num_blocks, *tensor.shape[1:]), tensor.dtype)
        for tensor in (storage.key, storage.value)
    )
    return KVStorage(key, value)


def _copy_tensor(source: torch.Tensor, target: torch.Tensor, pairs: _Pairs) -> None:
    if source.device == target.device:
        indices = torch.tensor(pairs, device=source.device)
        target[indices[:, 1]] = source[indices[:, 0]]
        return
    for from_block, to_block in pairs:
        target[to_block].copy_(source[from_block])
