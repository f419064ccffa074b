"""The tensors behind the KV block ids: one storage per layer, on the device and on the host."""

from collections.abc import Sequence

import torch

from loraplex.core.plan import BlockCopy, BlockTransfer
from loraplex.kernels.host_memory import zeroed
from loraplex.kernels.ops import AttentionShape, Kernels, KVStorage


class KVCache:
    """Who holds a block, and what is in it, only the block pool knows."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        num_host_blocks: int = 0,
    ) -> None:
        """dtype: of keys and values as they are stored, which the model's need not be."""
        self.storages: tuple[KVStorage, ...] = tuple(
            kernels.allocate_kv(num_blocks, shape, dtype) for _ in range(num_layers)
        )
        self.host_storages: tuple[KVStorage, ...] = tuple(
            KVStorage(
                _on_host(storage.key, num_host_blocks), _on_host(storage.value, num_host_blocks)
            )
            for storage in self.storages
        )
        """Blocks of the same form as the device's."""

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return sum(storage.num_bytes for storage in self.storages)

    def offload_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Device to host. On a GPU in the order of its stream, as everything that reads either."""
        pairs = [(transfer.device_block, transfer.host_block) for transfer in transfers]
        _copy(self.storages, self.host_storages, pairs)

    def load_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Host to device; see offload_blocks."""
        pairs = [(transfer.host_block, transfer.device_block) for transfer in transfers]
        _copy(self.host_storages, self.storages, pairs)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """All at once: every source is read before any target is written."""
        _copy(self.storages, self.storages, [(copy.source, copy.target) for copy in copies])


def block_bytes(num_layers: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Of one block in all layers: keys and values, with the scales that int8 has."""
    return num_layers * shape.block_bytes(dtype)


def _on_host(storage: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Blocks like those of the storage; pinned for a GPU, so that it copies them by itself."""
    shape = (num_blocks, *storage.shape[1:])
    if storage.device.type == "cpu":
        return zeroed(shape, storage.dtype)
    return torch.zeros(shape, dtype=storage.dtype, pin_memory=num_blocks > 0)


def _copy(
    sources: Sequence[KVStorage], targets: Sequence[KVStorage], pairs: Sequence[tuple[int, int]]
) -> None:
    """pairs: (block of the source, block of the target)"""
    if not pairs:
        return
    for source, target in zip(sources, targets, strict=True):
        _copy_tensor(source.key, target.key, pairs)
        _copy_tensor(source.value, target.value, pairs)


def _copy_tensor(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    if source.device == target.device:
        indices = torch.tensor(pairs, device=source.device)
        target[indices[:, 1]] = source[indices[:, 0]]
        return
    for from_block, to_block in pairs:
        target[to_block].copy_(source[from_block], non_blocking=True)
