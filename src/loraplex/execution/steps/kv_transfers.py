"""Moves blocks on an accelerator, and between it and pinned memory: all layers by few launches.

A block of the device is as many pieces as there are storages' tensors; on the host, all of them lie
one after another. Pieces of one size are moved by one launch.
"""

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from loraplex.execution.adapters.pinned_pages import PinnedPages
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import Storage

logger = logging.getLogger(__name__)

_Pair = tuple[int, int]
"""(block of the source, block of the target)"""
_ALIGNMENT = 16
"""Bytes: of a piece whose size is a multiple of it, as cuda.attention_storage.copy_blocks wants."""


class _Pieces(NamedTuple):
    """Tensors of which a block has pieces of one size."""

    num_bytes: int
    on_device: torch.Tensor
    """Where each tensor begins."""
    in_row: torch.Tensor
    """Where each one's piece begins, where the pieces of a block lie together."""


class KVTransfers:
    """Everything is enqueued in the compute queue, and nothing waits for the host."""

    def __init__(
        self, accelerator: Accelerator, storages: Sequence[Storage], num_host_blocks: int
    ) -> None:
        """storages: of the layers of a group; a stage of a pipeline may have none of them."""
        self._accelerator = accelerator
        by_size: dict[int, list[torch.Tensor]] = {}
        for tensor in itertools.chain.from_iterable(storage.tensors for storage in storages):
            assert tensor.is_contiguous(), "blocks are found by their addresses"
            by_size.setdefault(tensor[0].nbytes, []).append(tensor)
        self._pieces: list[_Pieces] = []
        end = 0
        # Pieces whose size is a multiple of the alignment come first, so they all begin at one.
        for size in sorted(by_size, key=lambda size: size % _ALIGNMENT != 0):
            tensors = by_size[size]
            first, end = end, end + len(tensors) * size
            self._pieces.append(
                _Pieces(
                    size,
                    self._sent([tensor.data_ptr() for tensor in tensors]),
                    self._sent(range(first, end, size)),
                )
            )
        self._row_bytes = end if len(by_size) < 2 else -(-end // _ALIGNMENT) * _ALIGNMENT
        num_pages = num_host_blocks if by_size else 0
        self._host_pages = _pinned_pages(accelerator, self._row_bytes, num_pages)
        self._host_blocks = [page.data_ptr() for page in self._host_pages]

    def offload(self, pairs: Sequence[_Pair]) -> None:
        """Device to host."""
        for pieces in self._pieces:
            rows = [
                (source * pieces.num_bytes, self._host_blocks[target]) for source, target in pairs
            ]
            self._copy(rows, pieces.on_device, pieces.in_row, pieces.num_bytes)

    def load(self, pairs: Sequence[_Pair]) -> None:
        """Host to device."""
        for pieces in self._pieces:
            rows = [
                (self._host_blocks[source], target * pieces.num_bytes) for source, target in pairs
            ]
            self._copy(rows, pieces.in_row, pieces.on_device, pieces.num_bytes)

    def copy(self, pairs: Sequence[_Pair]) -> None:
        """Copy blocks within the device; every source is read before any target is written."""
        is_disjoint = {source for source, _ in pairs}.isdisjoint(target for _, target in pairs)
        for pieces in self._pieces:
            size = pieces.num_bytes
            rows = [(source * size, target * size) for source, target in pairs]
            if is_disjoint:
                self._copy(rows, pieces.on_device, pieces.on_device, size)
                continue
            with self._accelerator.compute():
                between = torch.empty(
                    len(pairs) * self._row_bytes, dtype=torch.uint8, device=self._accelerator.device
                )
            first = between.data_ptr()
            places = [first + index * self._row_bytes for index in range(len(pairs))]
            sources, targets = zip(*rows, strict=True)
            self._copy(zip(sources, places, strict=True), pieces.on_device, pieces.in_row, size)
            self._copy(zip(places, targets, strict=True), pieces.in_row, pieces.on_device, size)

    def _copy(
        self,
        rows: Iterable[_Pair],
        source_columns: torch.Tensor,
        target_columns: torch.Tensor,
        num_bytes: int,
    ) -> None:
        """rows: (source, target); an address is the sum of a row and a column."""
        columns = list(zip(*rows, strict=True))
        if not columns:
            return
        # Triton need not be there for a CPU.
        from loraplex.kernels.cuda.attention_storage import copy_blocks  # noqa: PLC0415

        with self._accelerator.compute():
            copy_blocks(self._sent(columns), source_columns, target_columns, num_bytes)

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
