"""Tensors of the KV blocks: one storage per layer, on the device and on the host."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from loraplex.core.plan import BlockCopy, BlockTransfer
from loraplex.execution.steps.kv_transfers import KVTransfers
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.host_memory import zeroed
from loraplex.kernels.ops import AttentionShape, Kernels, KVStorage


class KVCache:
    """KV storage by block id. The block pool (memory) knows the owners and contents of blocks.

    On an accelerator blocks move in the order of the compute queue, as everything that reads them.
    """

    def __init__(
        self,
        num_blocks: int,
        shapes: Sequence[AttentionShape],
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        num_host_blocks: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        """shapes: of each layer. dtype: of stored keys and values, which may not be the model's."""
        # The steps that read it do not wait for work in other queues.
        with nullcontext() if accelerator is None else accelerator.compute():
            self.storages: tuple[KVStorage, ...] = tuple(
                kernels.allocate_kv(num_blocks, shape, dtype) for shape in shapes
            )
        self._transfers = None
        self.host_storages: tuple[KVStorage, ...] = ()
        """Blocks of the same form as the device's; none where there is an accelerator."""
        if accelerator is not None:
            self._transfers = KVTransfers(accelerator, self.storages, num_host_blocks)
        else:
            self.host_storages = tuple(
                KVStorage(
                    _on_host(storage.key, num_host_blocks), _on_host(storage.value, num_host_blocks)
                )
                for storage in self.storages
            )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(storage.num_bytes for storage in self.storages)

    def offload_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks from the device to the host."""
        pairs = [(transfer.device_block, transfer.host_block) for transfer in transfers]
        if self._transfers is not None:
            self._transfers.offload(pairs)
        else:
            _copy(self.storages, self.host_storages, pairs)

    def load_blocks(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy blocks from the host to the device."""
        pairs = [(transfer.host_block, transfer.device_block) for transfer in transfers]
        if self._transfers is not None:
            self._transfers.load(pairs)
        else:
            _copy(self.host_storages, self.storages, pairs)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks all at once: every source is read before any target is written."""
        pairs = [(copy.source, copy.target) for copy in copies]
        if self._transfers is not None:
            self._transfers.copy(pairs)
        else:
            _copy(self.storages, self.storages, pairs)


def block_bytes(shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers: keys and values, with the scales of int8."""
    return sum(shape.block_bytes(dtype) for shape in shapes)


def _on_host(storage: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Allocate blocks like those of the storage."""
    return zeroed((num_blocks, *storage.shape[1:]), storage.dtype)


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
        target[to_block].copy_(source[from_block])
