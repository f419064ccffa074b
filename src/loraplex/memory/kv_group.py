"""Blocks of one KV group: on the device, on the host, and those that its window has passed."""

import functools
from collections.abc import Callable, Iterable, Sequence

from loraplex.core.plan import NO_BLOCK, BlockId, BlockTransfer, KVGroupCapacity, KVGroupId
from loraplex.memory.attention_window import AttentionWindow
from loraplex.memory.block_pool import BlockPool
from loraplex.memory.block_tables import BlockTable
from loraplex.memory.host_blocks import HostBlocks


class KVGroup:
    """Pools and window of a set of layers that share one block table per sequence."""

    def __init__(
        self,
        group_id: KVGroupId,
        block_size: int,
        capacity: KVGroupCapacity,
        on_lost: Callable[[KVGroupId, BlockId], None],
    ) -> None:
        """on_lost: as of BlockPool, with the group's id before the block's."""
        self.group_id = group_id
        self.pool = BlockPool(capacity.num_blocks, functools.partial(on_lost, group_id))
        self.host = HostBlocks(capacity.num_host_blocks)
        self.window = AttentionWindow(
            block_size, capacity.attention_window, capacity.num_sink_tokens
        )

    @property
    def has_window(self) -> bool:
        """Whether sequences free blocks before they end."""
        return self.window.num_tokens is not None

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_available(self) -> int:
        """Number of blocks that can be taken now: free and cached ones."""
        return self.pool.num_available

    def needed(self, block_ids: Sequence[BlockId], num_computed_tokens: int) -> BlockTable:
        """Return full computed blocks, with gaps for those that the window has passed."""
        first_needed = self.window.first_needed(num_computed_tokens, len(block_ids))
        return [
            block_id if self.window.needs(index, first_needed) else NO_BLOCK
            for index, block_id in enumerate(block_ids)
        ]

    def has_space(self, hits: Sequence[BlockId], num_more: int) -> bool:
        """Return whether the hits can be shared, and num_more other blocks taken."""
        hits = without_gaps(hits)
        num_hits_cached = sum(self.pool.ref_count(block_id) == 0 for block_id in hits)
        return num_more + num_hits_cached <= self.num_available

    def share(self, block_ids: Sequence[BlockId]) -> None:
        self.pool.share(without_gaps(block_ids))

    def take(self, num_blocks: int) -> BlockTable:
        """Take blocks; there must be enough."""
        taken = self.pool.allocate(num_blocks)
        assert taken is not None, f"fewer than {num_blocks} blocks in KV group {self.group_id}"
        return taken

    def release(self, block_ids: Sequence[BlockId]) -> None:
        self.pool.release(without_gaps(block_ids))

    def release_passed(
        self, block_ids: BlockTable, num_computed_tokens: int, num_hashed_blocks: int
    ) -> None:
        """Free the blocks that no position from num_computed_tokens on sees, leaving gaps."""
        if not self.has_window:
            return
        end = self.window.first_needed(num_computed_tokens, num_hashed_blocks)
        index = end - 1
        while index >= self.window.num_sink_blocks and block_ids[index] != NO_BLOCK:
            index -= 1
        first = max(index + 1, self.window.num_sink_blocks)
        self.pool.release(block_ids[first:end])
        block_ids[first:end] = [NO_BLOCK] * max(0, end - first)

    def offload(self, block_ids: Sequence[BlockId]) -> BlockTable:
        """Take host blocks for a table without its gaps; there must be enough."""
        taken = self.host.allocate(len(without_gaps(block_ids)))
        assert taken is not None, f"too few host blocks in KV group {self.group_id}"
        return _filled(block_ids, taken)

    def load_back(self, host_block_ids: Sequence[BlockId], num_more: int) -> BlockTable:
        """Take blocks for a host table without its gaps, and num_more after it."""
        taken = self.take(len(without_gaps(host_block_ids)) + num_more)
        num_loaded = len(taken) - num_more
        return _filled(host_block_ids, taken[:num_loaded]) + taken[num_loaded:]

    def free_host(self, host_block_ids: Sequence[BlockId]) -> None:
        self.host.release(without_gaps(host_block_ids))

    def transfers(
        self, device: Sequence[BlockId], host: Sequence[BlockId]
    ) -> Iterable[BlockTransfer]:
        """Return the transfers between two tables with the same gaps; the rest of one is left."""
        for device_block, host_block in zip(device, host, strict=False):
            if device_block != NO_BLOCK:
                yield BlockTransfer(self.group_id, device_block, host_block)

    def check(
        self,
        tables: Iterable[Sequence[BlockId]] | None,
        host_tables: Iterable[Sequence[BlockId]] | None,
    ) -> None:
        """Assert that no block is lost; with all tables that exist, also check the counts."""
        self.pool.check(tables)
        self.host.check(host_tables)


def without_gaps(block_ids: Sequence[BlockId]) -> BlockTable:
    """Return the blocks of a table."""
    return [block_id for block_id in block_ids if block_id != NO_BLOCK]


def _filled(block_ids: Sequence[BlockId], taken: Sequence[BlockId]) -> BlockTable:
    """Return a table of the taken blocks with the gaps of another one."""
    free = iter(taken)
    return [NO_BLOCK if block_id == NO_BLOCK else next(free) for block_id in block_ids]
