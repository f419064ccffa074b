"""Ownership of KV blocks: reference counts, and which block to allocate next.

This module handles only integers. The tensors of the blocks belong to the runner, and only the
prefix cache knows the content of a block.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from loraplex.core.plan import NO_BLOCK, BlockId
from loraplex.core.retention import BlockRetention
from loraplex.memory.cached_blocks import CachedBlocks

_DEFAULT_RETENTION = BlockRetention()


def _ignore(_block_id: BlockId) -> None:
    """Ignore that the content of a block is lost."""


class BlockPool:
    """A fixed set of block ids with reference counts.

    Invariant: every id is exactly one of free (count 0, in the free list once), cached (count 0,
    kept, in the eviction order once) or held (count > 0, in neither).

    `on_lost(block_id)` is called when the content of a block is lost: when a cached block is
    evicted, and when a held block that is not kept becomes free. It may call `drop` and `keep` for
    other blocks.
    """

    def __init__(self, num_blocks: int, on_lost: Callable[[BlockId], None] = _ignore) -> None:
        self._on_lost = on_lost
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = CachedBlocks()
        self.kept: set[BlockId] = set()
        self._retentions: dict[BlockId, BlockRetention] = {}
        """Retentions of blocks that are not free, if they differ from the default."""
        self._now_ns = 0

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return len(self._ref_counts) - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can take: free and cached ones."""
        return self.num_free + self.num_cached

    def ref_count(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def allocate(self, n: int) -> list[BlockId] | None:
        """Take n blocks, or None and no change if fewer than n are available.

        Free blocks go first, then cached ones: of the lowest priority, the least recently released.
        """
        if n > self.num_available:
            return None
        return [self._take() for _ in range(n)]

    def _take(self) -> BlockId:
        if self._free:
            block_id = self._free.pop()
            self._ref_counts[block_id] = 1
            return block_id
        block_id = self._cached.pop(self._now_ns)
        self._ref_counts[block_id] = 1
        self.kept.remove(block_id)
        self._retentions.pop(block_id, None)
        self._on_lost(block_id)
        return block_id

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one holder to each block; a cached block becomes held. Not for free blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._cached.remove(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one holder of each block of a block table, given in the table's order.

        The tail goes first, so that a cached prefix outlives its tail. A block without holders
        becomes cached if it is kept, else free.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} has no holder"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self.kept:
                retention = self._retentions.get(block_id, _DEFAULT_RETENTION)
                self._cached.add(block_id, retention, self._now_ns)
            else:
                self._add_to_free(block_id)
                self._on_lost(block_id)

    def keep(self, block_id: BlockId) -> None:
        """Mark a held block's content as worth keeping: without holders it becomes cached."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} has no holder"
        self.kept.add(block_id)

    def drop(self, block_id: BlockId) -> None:
        """Undo `keep`; a cached block becomes free at once. `on_lost` is not called."""
        self.kept.discard(block_id)
        if block_id in self._cached:
            self._cached.remove(block_id)
            self._add_to_free(block_id)

    def retain(self, block_id: BlockId, retention: BlockRetention) -> None:
        """Set how long to keep a held block's content after its next release."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} has no holder"
        self._retentions[block_id] = retention

    def advance(self, now_ns: int) -> None:
        """Set the present time: durations begin with a release, and may have ended."""
        self._now_ns = now_ns

    def _add_to_free(self, block_id: BlockId) -> None:
        self._retentions.pop(block_id, None)
        self._free.append(block_id)

    def check(self, tables: Iterable[Sequence[BlockId]] | None = None) -> None:
        """Assert that no block is lost or counted twice.

        tables: all block tables that exist. Then each count must be the number of tables that name
        the block.
        """
        held = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        everything = [*self._free, *self._cached, *held]
        assert sorted(everything) == list(range(self.num_blocks)), "free + cached + held = all"
        assert self.num_held == len(held)
        assert min(self._ref_counts, default=0) >= 0
        assert self.kept == set(self._cached) | (self.kept & held), "a free block is kept"
        assert self._retentions.keys().isdisjoint(self._free), "a free block is retained"
        self._cached.check()
        if tables is not None:
            holders = Counter(b for table in tables for b in table if b != NO_BLOCK)
            counts = {block_id: self._ref_counts[block_id] for block_id in held}
            assert counts == holders, f"counts {counts}, {holders} of the tables"
