"""Tensors of the blocks: a storage per cache group and layer, on the device and on the host."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from loraplex.core.cache import CachedFloats, CachedVectors, StorageSpec
from loraplex.core.plan import BlockCopy, BlockId, BlockTransfer, CacheGroupCapacity, CacheGroupId
from loraplex.execution.steps.kv_transfers import KVTransfers
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.host_tensors import zeroed
from loraplex.kernels.ops import AttentionShape, Kernels, Storage, stored_size
from loraplex.models.cache_groups import LayerGroup
from loraplex.models.mixers.mixer import Storages

_Pairs = Sequence[tuple[BlockId, BlockId]]
"""(block of the source, block of the target)"""


class KVCache:
    """Storage by cache group and block id. The pools (memory) know the blocks' owners and contents.

    On an accelerator blocks move in the order of the compute queue, as everything that reads them.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        capacities: Sequence[CacheGroupCapacity],
        num_layers: int,
        block_size: int,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        device: torch.device,
        accelerator: Accelerator | None = None,
    ) -> None:
        """capacities: of each group. dtype: of stored vectors, which may not be the model's."""

        def allocated(group: LayerGroup, num_blocks: int) -> tuple[Storage | None, ...]:
            made: list[Storage | None] = [None] * num_layers
            for layer in group.layers:
                made[layer] = _allocated(
                    group.storage, num_blocks, block_size, dtype, kernels, device
                )
            return tuple(made)

        # The steps that read it do not wait for work in other queues.
        with nullcontext() if accelerator is None else accelerator.compute():
            self.storages: Storages = tuple(
                allocated(group, capacity.num_blocks)
                for group, capacity in zip(groups, capacities, strict=True)
            )
        self._transfers: tuple[KVTransfers, ...] = ()
        """Transfers of each group, where there is an accelerator."""
        self.host_storages: Storages = ()
        """Blocks of the same form as the device's; none where there is an accelerator."""
        of_groups = list(zip(self.storages, capacities, strict=True))
        if accelerator is not None:
            self._transfers = tuple(
                KVTransfers(accelerator, _of_layers(storages), capacity.num_host_blocks)
                for storages, capacity in of_groups
            )
        else:
            self.host_storages = tuple(
                tuple(
                    None if storage is None else _on_host(storage, capacity.num_host_blocks)
                    for storage in storages
                )
                for storages, capacity in of_groups
            )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(
            storage.num_bytes for storages in self.storages for storage in _of_layers(storages)
        )

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
        self, group: CacheGroupId, sources: Storages, targets: Storages, pairs: _Pairs
    ) -> None:
        for source, target in zip(
            _of_layers(sources[group]), _of_layers(targets[group]), strict=True
        ):
            for source_tensor, target_tensor in zip(source.tensors, target.tensors, strict=True):
                _copy_tensor(source_tensor, target_tensor, pairs)


def _allocated(
    spec: StorageSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
) -> Storage:
    """Allocate one layer's storage, zero: num_blocks * storage_bytes(...) bytes.

    Keys and values lie as the kernels want them; of other vectors and numbers every block, and in
    it every head or position, is contiguous.
    """
    if len(spec) == 2 and spec[0] == spec[1] and isinstance(spec[0], CachedVectors):
        heads = spec[0].num_heads
        # A storage has no query heads.
        shape = AttentionShape(heads, heads, spec[0].size, block_size)
        return kernels.allocate_kv(num_blocks, shape, dtype)
    tensors = []
    for each in spec:
        if isinstance(each, CachedFloats):
            positions = (block_size,) if each.is_per_position else ()
            sizes, of_type = (*positions, *each.shape), torch.float32
        else:
            sizes, of_type = (each.num_heads, block_size, stored_size(each.size, dtype)), dtype
        tensors.append(torch.zeros((num_blocks, *sizes), dtype=of_type, device=device))
    return Storage(tuple(tensors))


def _of_layers(storages: Iterable[Storage | None]) -> list[Storage]:
    """Return the storages of the layers that have one."""
    return [storage for storage in storages if storage is not None]


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
