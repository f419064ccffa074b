"""Blocks without holders that are kept for their content, in eviction order."""

import heapq
from collections.abc import Iterator

from loraplex.core.plan import BlockId
from loraplex.core.retention import DEFAULT_PRIORITY, BlockRetention

_MIN_STALE = 64


class CachedBlocks:
    """Queue of cached blocks: the lowest priority leaves first, then the block that came first.

    A block whose duration is over has the default priority, and the place there that it would have
    had from the start. Every call costs O(log n) for n blocks on average.
    """

    def __init__(self) -> None:
        self._keys: dict[BlockId, tuple[int, int]] = {}
        """(priority, number): a block that came later has the larger number."""
        self._order: list[tuple[int, int, BlockId]] = []
        """Heap of keys. Keys of blocks that have left are skipped when they are met."""
        self._expiries: list[tuple[int, int, BlockId]] = []
        """Heap of (end of the duration, number, block), also with entries to skip."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._keys

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._keys)

    def add(self, block_id: BlockId, retention: BlockRetention, now_ns: int) -> None:
        """Add a block; its duration begins now."""
        assert block_id not in self._keys, f"block {block_id} is here already"
        self._num_added += 1
        self._place(block_id, retention.priority, self._num_added)
        if retention.duration_ns is not None and retention.priority != DEFAULT_PRIORITY:
            ends_ns = now_ns + retention.duration_ns
            heapq.heappush(self._expiries, (ends_ns, self._num_added, block_id))
        self._drop_stale()

    def remove(self, block_id: BlockId) -> None:
        del self._keys[block_id]

    def pop(self, now_ns: int) -> BlockId:
        """Remove and return the block that leaves first. There must be one."""
        self._expire(now_ns)
        while True:
            priority, number, block_id = heapq.heappop(self._order)
            if self._keys.get(block_id) == (priority, number):
                del self._keys[block_id]
                return block_id

    def check(self) -> None:
        """Assert that every block has its place in the order."""
        assert {(*key, block_id) for block_id, key in self._keys.items()} <= set(self._order)

    def _place(self, block_id: BlockId, priority: int, number: int) -> None:
        self._keys[block_id] = (priority, number)
        heapq.heappush(self._order, (priority, number, block_id))

    def _expire(self, now_ns: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, number, block_id = heapq.heappop(self._expiries)
            if self._is_current(block_id, number):
                self._place(block_id, DEFAULT_PRIORITY, number)

    def _is_current(self, block_id: BlockId, number: int) -> bool:
        key = self._keys.get(block_id)
        return key is not None and key[1] == number

    def _drop_stale(self) -> None:
        """Rebuild the heaps when most entries are stale.

        Otherwise they would grow for ever while the first block stays and others come and go.
        """
        if len(self._order) > 2 * len(self._keys) + _MIN_STALE:
            self._order = [(*key, block_id) for block_id, key in self._keys.items()]
            heapq.heapify(self._order)
        if len(self._expiries) > 2 * len(self._keys) + _MIN_STALE:
            self._expiries = [e for e in self._expiries if self._is_current(e[2], e[1])]
            heapq.heapify(self._expiries)
