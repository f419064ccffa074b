"""Blocks of one cache group: on the device, on the host, and those that are no longer needed."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from loraplex.core.plan import NO_BLOCK, BlockId, BlockTransfer, CacheGroupCapacity, CacheGroupId
from loraplex.memory.block_pool import BlockPool
from loraplex.memory.block_tables import BlockTable
from loraplex.memory.cache_policy import cache_policy


class HostBlocks:
    """Ids of the KV blocks in host memory, each with one holder or none: free + held = all."""

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


class CacheGroup:
    """Pools and policy of a set of layers that share one block table per sequence."""

    def __init__(
        self,
        group_id: CacheGroupId,
        block_size: int,
        capacity: CacheGroupCapacity,
        on_lost: Callable[[CacheGroupId, BlockId], None],
        checkpoint_tokens: int = 0,
    ) -> None:
        """on_lost: as of BlockPool, with the group's id before the block's.

        block_size, checkpoint_tokens: as of `cache_policy`.
        """
        self.group_id = group_id
        self.block_bytes = capacity.block_bytes
        self.num_blocks = capacity.num_blocks
        self.pool = BlockPool(capacity.num_blocks, functools.partial(on_lost, group_id))
        self.host = HostBlocks(capacity.num_host_blocks)
        self.spec = capacity.spec
        self.policy = cache_policy(capacity.spec, block_size, checkpoint_tokens)
        self.block_size = self.policy.block_size
        """Number of positions from one entry of a table to the next."""
        self.is_sparse = self.policy.is_sparse
        self.is_of_encoder = self.policy.is_of_encoder
        """Whether its positions are those of the encoder's input."""
        self.num_open = self.block_size - 1 if self.is_sparse else 0
        if self.is_of_encoder:
            self.num_open = sys.maxsize  # no number of tokens needs more blocks
        """Number of positions after the last entry of a table that need no other one."""
        self.frees_early = self.policy.frees_early
        """Whether sequences free blocks before they end."""
        self._num_cached_blocks = self.block_size // block_size

    @property
    def num_available(self) -> int:
        """Number of blocks that can be taken now: free and cached ones."""
        return self.pool.num_available

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Return the number of entries that num_tokens computed tokens fill or touch.

        In a group of the encoder's positions, that num_encoder_tokens fill or touch.
        """
        length = num_encoder_tokens if self.is_of_encoder else num_tokens
        return len(self.policy.takes(0, length))

    def num_missing(
        self, length: int, num_tokens: int, num_certain_tokens: int, num_encoder_tokens: int = 0
    ) -> int:
        """Return how many blocks a table of a length must take for num_tokens tokens.

        num_certain_tokens: what a step to num_tokens computes at least. num_encoder_tokens: 0 for
        a table of a sequence that was admitted, which has all blocks of the encoder's positions.
        """
        first = max(length, self.policy.first_taken(num_certain_tokens))
        return max(0, self.num_blocks_for(num_tokens, num_encoder_tokens) - first)

    def num_fitting(self, length: int, num_missing: int, num_to_leave: int) -> int:
        """Return how many tokens fit in a table that takes up to num_missing blocks.

        num_to_leave: blocks that must stay available. A sparse group takes one.
        """
        limit = 1 if self.is_sparse else num_missing
        num_more = max(0, min(num_missing, self.num_available - num_to_leave, limit))
        return (length + num_more) * self.block_size + self.num_open

    def of_cached_blocks(self, table: Sequence[BlockId]) -> Sequence[BlockId]:
        """Return the entries that blocks of the prefix cache are; gaps are those that it lacks."""
        step = self._num_cached_blocks
        return table[step - 1 :: step]

    def num_cached_blocks_before(self, index: int) -> int:
        """Return after how many blocks of the prefix cache a sequence does not need an entry."""
        return (index + 1) * self._num_cached_blocks - 1

    def published(
        self, table: Sequence[BlockId], cached_index: int, num_prompt_tokens: int
    ) -> BlockId:
        """Return the block that the prefix cache gets of a table; a gap: none."""
        if self.is_of_encoder:
            return NO_BLOCK
        if not self.is_sparse:
            return table[cached_index]
        num_entries, rest = divmod(cached_index + 1, self._num_cached_blocks)
        if rest or not self.policy.is_published(num_entries - 1, num_prompt_tokens):
            return NO_BLOCK
        return table[num_entries - 1]

    def needed(self, block_ids: Sequence[BlockId], num_computed_tokens: int) -> BlockTable:
        """Return full computed blocks, with gaps for those that later positions do not read."""
        needed = self.policy.needed(num_computed_tokens)
        return [
            block_id if needed.includes(index) else NO_BLOCK
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
        assert taken is not None, f"fewer than {num_blocks} blocks in cache group {self.group_id}"
        return taken

    def extend(
        self, table: BlockTable, num_tokens: int, num_certain_tokens: int, num_to_leave: int
    ) -> BlockTable:
        """Return what to append to a table for num_tokens tokens; there must be enough blocks.

        A sparse group takes checkpoints, too, as far as num_to_leave blocks stay available.
        """
        length = len(table)
        num_missing = self.num_missing(length, num_tokens, num_certain_tokens)
        num_gaps = self.num_blocks_for(num_tokens) - length - num_missing
        if num_gaps <= 0:
            return self.take(num_missing)
        checkpoints = [
            index for index in range(num_gaps) if self.policy.is_published(length + index, 0)
        ]
        num_spare = max(0, self.num_available - num_missing - num_to_leave)
        entries = [NO_BLOCK] * num_gaps + self.take(num_missing)
        for index in checkpoints[:num_spare]:
            (entries[index],) = self.take(1)
        return entries

    def release(self, block_ids: Sequence[BlockId]) -> None:
        self.pool.release(without_gaps(block_ids))

    def release_passed(
        self, block_ids: BlockTable, num_computed_tokens: int, num_released_tokens: int
    ) -> None:
        """Free the blocks that no position from num_computed_tokens on reads, leaving gaps.

        It was done before for num_released_tokens.
        """
        if not self.frees_early:
            return
        num_first, end = self.policy.needed(num_computed_tokens)
        first = max(num_first, self.policy.needed(num_released_tokens).since)
        if first < end:
            self.release(block_ids[first:end])
            block_ids[first:end] = [NO_BLOCK] * (end - first)

    def offload(self, block_ids: Sequence[BlockId]) -> BlockTable:
        """Take host blocks for a table without its gaps; there must be enough."""
        taken = self.host.allocate(len(without_gaps(block_ids)))
        assert taken is not None, f"too few host blocks in cache group {self.group_id}"
        return _filled(block_ids, taken)

    def load_back(self, host_block_ids: Sequence[BlockId]) -> BlockTable:
        """Take blocks for a host table without its gaps; there must be enough."""
        return _filled(host_block_ids, self.take(len(without_gaps(host_block_ids))))

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
