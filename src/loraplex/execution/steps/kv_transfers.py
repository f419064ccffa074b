"""Moves KV blocks on an accelerator, and between it and pinned memory: all layers by one launch.

A block of the device is as many pieces as there are storages' tensors; on the host, all of them lie
one after another.
"""

import logging
import time
from collections.abc import Iterable, Sequence

import torch

from loraplex.execution.adapters.pinned_pages import PinnedPages
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import KVStorage

logger = logging.getLogger(__name__)

_Pair = tuple[int, int]
"""(block of the source, block of the target)"""


class KVTransfers:
    """Everything is enqueued in the compute queue, and nothing waits for the host."""

    def __init__(
        self, accelerator: Accelerator, storages: Sequence[KVStorage], num_host_blocks: int
    ) -> None:
        self._accelerator = accelerator
        tensors = [tensor for storage in storages for tensor in (storage.key, storage.value)]
        self._num_tensors = len(tensors)
        self._piece_bytes = tensors[0][0].nbytes
        for tensor in tensors:
            assert tensor.is_contiguous(), "blocks are found by their addresses"
            assert tensor[0].nbytes == self._piece_bytes, "all layers are alike"
        self._on_device = self._sent([tensor.data_ptr() for tensor in tensors])
        """Where each tensor begins."""
        self._in_row = self._sent([i * self._piece_bytes for i in range(len(tensors))])
        """Where each one's piece begins, where the pieces of a block lie together."""
        self._host_pages = _pinned_pages(accelerator, self._block_bytes, num_host_blocks)
        self._host_blocks = [page.data_ptr() for page in self._host_pages]

    @property
    def _block_bytes(self) -> int:
        return self._num_tensors * self._piece_bytes

    def offload(self, pairs: Sequence[_Pair]) -> None:
        """Device to host."""
        rows = [(self._row(source), self._host_blocks[target]) for source, target in pairs]
        self._copy(rows, self._on_device, self._in_row)

    def load(self, pairs: Sequence[_Pair]) -> None:
        """Host to device."""
        rows = [(self._host_blocks[source], self._row(target)) for source, target in pairs]
        self._copy(rows, self._in_row, self._on_device)

    def copy(self, pairs: Sequence[_Pair]) -> None:
        """Copy blocks within the device; every source is read before any target is written."""
        rows = [(self._row(source), self._row(target)) for source, target in pairs]
        if {source for source, _ in pairs}.isdisjoint(target for _, target in pairs):
            self._copy(rows, self._on_device, self._on_device)
            return
        with self._accelerator.compute():
            num_bytes = len(pairs) * self._block_bytes
            between = torch.empty(num_bytes, dtype=torch.uint8, device=self._accelerator.device)
        first = between.data_ptr()
        places = [first + index * self._block_bytes for index in range(len(pairs))]
        sources, targets = zip(*rows, strict=True)
        self._copy(zip(sources, places, strict=True), self._on_device, self._in_row)
        self._copy(zip(places, targets, strict=True), self._in_row, self._on_device)

    def _row(self, block: int) -> int:
        """Where a block begins in each tensor of the device."""
        return block * self._piece_bytes

    def _copy(
        self, rows: Iterable[_Pair], source_columns: torch.Tensor, target_columns: torch.Tensor
    ) -> None:
        """rows: (source, target); an address is the sum of a row and a column."""
        columns = list(zip(*rows, strict=True))
        if not columns:
            return
        # Triton need not be there for a CPU.
        from loraplex.kernels.cuda.blocks import copy_blocks  # noqa: PLC0415

        with self._accelerator.compute():
            copy_blocks(self._sent(columns), source_columns, target_columns, self._piece_bytes)

    def _sent(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """int64 on the device."""
        values = torch.tensor(numbers, dtype=torch.int64)
        staging = self._accelerator.pinned(tuple(values.shape), values.dtype)
        staging.copy_(values)
        with self._accelerator.compute():
            on_device = torch.empty_like(values, device=self._accelerator.device)
            self._accelerator.copy(staging, on_device)
        return on_device


def _pinned_pages(
    accelerator: Accelerator, block_bytes: int, num_blocks: int
) -> Sequence[torch.Tensor]:
    if num_blocks == 0:
        return ()
    start = time.monotonic()
    arena = PinnedPages(accelerator, block_bytes, torch.uint8)
    pages = arena.take(num_blocks).pages
    seconds = time.monotonic() - start
    logger.info("pinned %d MiB for KV blocks in %.1f s", arena.num_bytes >> 20, seconds)
    return pages
