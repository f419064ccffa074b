"""The tensors behind the KV block ids: one storage per layer, and copies of whole blocks."""

from collections.abc import Sequence

import torch

from loraplex.core.plan import BlockCopy
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
    ) -> None:
        """dtype: of keys and values as they are stored, which the model's need not be."""
        self.storages: tuple[KVStorage, ...] = tuple(
            kernels.allocate_kv(num_blocks, shape, dtype) for _ in range(num_layers)
        )

    @property
    def num_bytes(self) -> int:
        return sum(storage.num_bytes for storage in self.storages)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """All at once: every source is read before any target is written."""
        if not copies:
            return
        device = self.storages[0].key.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        for storage in self.storages:
            for blocks in (storage.key, storage.value):
                blocks[targets] = blocks[sources]


def block_bytes(num_layers: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Of one block in all layers: keys and values, with the scales that int8 has."""
    return num_layers * shape.block_bytes(dtype)
