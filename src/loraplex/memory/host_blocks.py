"""Ownership of the KV blocks in host memory: each has one holder or none."""

from collections import Counter
from collections.abc import Iterable, Sequence

from loraplex.core.plan import NO_BLOCK, BlockId


class HostBlocks:
    """A fixed set of block ids: free + held = all."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: set[BlockId] = set()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def allocate(self, n: int) -> list[BlockId] | None:
        """Take n blocks; None and no change if there are fewer."""
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        self._held.update(taken)
        return taken

    def release(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            self._held.remove(block_id)
            self._free.append(block_id)

    def check(self, tables: Iterable[Sequence[BlockId]] | None = None) -> None:
        """Assert that no block is lost; with all host tables that exist, also check the holders."""
        assert sorted([*self._free, *self._held]) == list(range(self._num_blocks)), (
            "free + held host blocks = all"
        )
        if tables is not None:
            holders = Counter(b for table in tables for b in table if b != NO_BLOCK)
            assert holders == Counter(self._held), "host blocks without a holder, or with two"
