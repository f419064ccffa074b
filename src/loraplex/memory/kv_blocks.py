"""KV blocks as the scheduler sees them: admit, grow, publish, share, release.

Joins the block pool (who holds a block) with the prefix cache (what a block holds). It keeps
nothing per sequence: the block table is the sequence's, and the scheduler writes it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loraplex.core.plan import BlockId
from loraplex.memory.block_pool import BlockPool
from loraplex.memory.prefix_cache import HashFunction, PrefixCache, hash_block


class Admission(NamedTuple):
    """The first blocks of a sequence."""

    block_ids: list[BlockId]
    """Those found in the prefix cache, then new ones."""
    num_cached_tokens: int
    """Tokens whose KV is there already: a multiple of the block size, so
    num_cached_tokens // block_size is the sequence's num_hashed_blocks."""
    num_new_tokens: int
    """Tokens that these blocks have room to compute now: at least 1."""


class KVBlocks:
    """The KV blocks of one KV group."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self._block_size = block_size
        self._prefix_cache = PrefixCache(
            block_size, enabled=prefix_caching, hash_function=hash_function
        )
        self._pool = BlockPool(num_blocks, on_lost=self._forget)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached."""
        return self._pool.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of num_tokens computed tokens fills or touches."""
        return -(-num_tokens // self._block_size)

    def admit(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        max_new_tokens: int,
        *,
        max_cached_tokens: int | None = None,
        num_reserved_blocks: int = 0,
    ) -> Admission | None:
        """Blocks for a sequence that has none: new, or preempted before.

        Serves the longest cached beginning, but never the last token: one is always left to
        compute. Then takes blocks for up to max_new_tokens (>= 1) of the tokens after it. None
        and no change if they, and num_reserved_blocks that must stay available, are not there.

        max_cached_tokens = 0 serves nothing (prompt log probabilities need every position).
        """
        assert token_ids, "an empty sequence"
        assert max_new_tokens > 0, "nothing to compute"
        limit = len(token_ids) - 1
        if max_cached_tokens is not None:
            limit = min(limit, max_cached_tokens)
        hits = self._prefix_cache.match(token_ids, kv_salt, limit)
        num_cached = len(hits) * self._block_size
        num_new = min(max_new_tokens, len(token_ids) - num_cached)
        num_to_take = self.num_blocks_for(num_cached + num_new) - len(hits)
        num_hits_cached = sum(self._pool.ref_count(block_id) == 0 for block_id in hits)
        if num_to_take + num_hits_cached + num_reserved_blocks > self.num_available:
            return None
        # The hits are held before blocks are taken: taking must not evict them.
        self._pool.share(hits)
        taken = self._pool.allocate(num_to_take)
        assert taken is not None
        return Admission(hits + taken, num_cached, num_new)

    def grow(self, block_ids: Sequence[BlockId], num_tokens: int) -> list[BlockId] | None:
        """The blocks to append to a block table so that num_tokens tokens fit.

        Empty if they fit already; None and no change if there are not enough blocks.
        """
        return self._pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(block_ids)))

    def publish(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        block_ids: Sequence[BlockId],
        num_hashed_blocks: int,
        num_computed_tokens: int,
    ) -> int:
        """Let other sequences find the blocks that became full; the new num_hashed_blocks.

        Call it only for tokens whose KV is written: after their step, and not for a failed row.
        """
        num_full = num_computed_tokens // self._block_size
        for index in range(num_hashed_blocks, num_full):
            start = index * self._block_size
            tokens = token_ids[start : start + self._block_size]
            parent_id = block_ids[index - 1] if index else None
            if self._prefix_cache.insert(block_ids[index], parent_id, tokens, kv_salt):
                self._pool.keep(block_ids[index])
        return max(num_hashed_blocks, num_full)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """One more holder for each block: a fork takes over the block table."""
        self._pool.share(block_ids)

    def is_shared(self, block_id: BlockId) -> bool:
        """Has it several holders? Then it must be copied before it is written."""
        return self._pool.ref_count(block_id) > 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Give up one hold of each block of a block table, in the table's order."""
        self._pool.release(block_ids)

    def check(self, tables: Iterable[Sequence[BlockId]] | None = None) -> None:
        """Conservation; with all block tables that exist, also their counts."""
        self._pool.check(tables)
        self._prefix_cache.check()
        for block_id in range(self.num_blocks):
            assert self._pool.is_kept(block_id) == self._prefix_cache.serves(block_id), (
                f"block {block_id}: pool and prefix cache do not agree"
            )

    def _forget(self, block_id: BlockId) -> None:
        forgotten = self._prefix_cache.forget(block_id)
        for orphan in forgotten.orphans:
            self._pool.drop(orphan)
        if forgotten.heir is not None:
            self._pool.keep(forgotten.heir)
