"""KV blocks for the scheduler: admit, grow, publish, share, offload, release.

KVBlocks joins the block pool (holders), the prefix cache (content) and the host's blocks. It keeps
no state per sequence: the scheduler owns the block tables. A table may have gaps (NO_BLOCK) where a
window has passed.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loraplex.core.plan import NO_BLOCK, BlockCopy, BlockId, BlockTransfer
from loraplex.core.retention import KVRetention, block_retention
from loraplex.memory.attention_window import AttentionWindow
from loraplex.memory.block_pool import BlockPool
from loraplex.memory.host_blocks import HostBlocks
from loraplex.memory.prefix_cache import HashFunction, PrefixCache, hash_block


class AdmittedBlocks(NamedTuple):
    """The first blocks of a sequence."""

    block_ids: list[BlockId]
    """Blocks found in the prefix cache, then new ones. A found one that a window has passed is a
    gap."""
    num_cached_tokens: int
    """Tokens whose KV is in these blocks already: a multiple of the block size, so
    num_cached_tokens // block_size is the sequence's num_hashed_blocks."""
    num_new_tokens: int
    """Tokens that fit in the other blocks: at least 1."""


class Offload(NamedTuple):
    """Transfer of a block table to the host."""

    host_block_ids: list[BlockId]
    """Host table, with the gaps of the block table."""
    transfers: tuple[BlockTransfer, ...]


class Loaded(NamedTuple):
    """A block table that came back from the host."""

    block_ids: list[BlockId]
    transfers: tuple[BlockTransfer, ...]
    num_hashed_blocks: int
    """Leading blocks that the prefix cache still had; the others must be published again."""


class KVBlocks:
    """The KV blocks of one KV group."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
        num_host_blocks: int = 0,
        attention_window: int | None = None,
        num_sink_tokens: int = 0,
    ) -> None:
        """attention_window, num_sink_tokens: as in Capacity."""
        self._block_size = block_size
        self._prefix_cache = PrefixCache(
            block_size, enabled=prefix_caching, hash_function=hash_function
        )
        self._pool = BlockPool(num_blocks, on_lost=self._forget)
        self._host = HostBlocks(num_host_blocks)
        self._window = AttentionWindow(block_size, attention_window, num_sink_tokens)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def has_window(self) -> bool:
        """Whether sequences free blocks before they end."""
        return self._window.num_tokens is not None

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
        """Number of blocks that can be taken now: free and cached ones."""
        return self._pool.num_available

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def num_host_free(self) -> int:
        return self._host.num_free

    def advance(self, now_ns: int) -> None:
        """Set the present time, by which the durations of retained blocks begin and end."""
        self._pool.advance(now_ns)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that num_tokens computed tokens fill or touch."""
        return -(-num_tokens // self._block_size)

    def max_blocks_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of num_tokens tokens holds at once.

        max_step_tokens: maximum number of tokens in one step, each followed by `release_passed`.
        Without a window the result is num_blocks_for(num_tokens).
        """
        return self._window.max_blocks_held(num_tokens, max_step_tokens)

    def admit(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        max_new_tokens: int,
        *,
        max_cached_tokens: int | None = None,
        num_reserved_blocks: int = 0,
        retention: KVRetention | None = None,
        num_prompt_tokens: int = 0,
    ) -> AdmittedBlocks | None:
        """Return blocks for a sequence that has none: a new one, or one preempted before.

        Serves the longest cached beginning, but never the last token: one is always left to
        compute. Then takes blocks for up to max_new_tokens (>= 1) of the tokens after it. None and
        no change if there are too few blocks; num_reserved_blocks must stay available.

        max_cached_tokens = 0 serves nothing (prompt log probabilities need every position).
        `retention`, for a prompt of num_prompt_tokens, applies to served blocks from now on.
        """
        assert token_ids, "an empty sequence"
        assert max_new_tokens > 0, "nothing to compute"
        limit = len(token_ids) - 1
        if max_cached_tokens is not None:
            limit = min(limit, max_cached_tokens)
        found = self._prefix_cache.match(token_ids, kv_salt, limit)
        num_cached = len(found) * self._block_size
        num_new = min(max_new_tokens, len(token_ids) - num_cached)
        first_needed = self._window.first_needed(num_cached, len(found))
        hits = [
            block_id if self._window.needs(index, first_needed) else NO_BLOCK
            for index, block_id in enumerate(found)
        ]
        num_to_take = self.num_blocks_for(num_cached + num_new) - len(hits)
        taken = self._share_and_take(hits, num_to_take, num_reserved_blocks)
        if taken is None:
            return None
        for index, block_id in enumerate(hits):
            self._retain(block_id, retention, index, num_prompt_tokens)
        return AdmittedBlocks(hits + taken, num_cached, num_new)

    def _share_and_take(
        self, hits: Sequence[BlockId], num_to_take: int, num_reserved_blocks: int
    ) -> list[BlockId] | None:
        """Share the hits and take new blocks; None and no change if there are too few."""
        hits = _without_gaps(hits)
        num_hits_cached = sum(self._pool.ref_count(block_id) == 0 for block_id in hits)
        if num_to_take + num_hits_cached + num_reserved_blocks > self.num_available:
            return None
        # The hits are shared before blocks are taken: taking must not evict them.
        self._pool.share(hits)
        return self._pool.allocate(num_to_take)

    def grow(self, block_ids: Sequence[BlockId], num_tokens: int) -> list[BlockId] | None:
        """Return the blocks to append to a block table so that num_tokens tokens fit.

        Empty if they fit already; None and no change if there are not enough blocks.
        """
        num_missing = self.num_blocks_for(num_tokens) - len(block_ids)
        return self._pool.allocate(num_missing) if num_missing > 0 else []

    def publish(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        block_ids: Sequence[BlockId],
        num_hashed_blocks: int,
        num_computed_tokens: int,
        *,
        retention: KVRetention | None = None,
        num_prompt_tokens: int = 0,
    ) -> int:
        """Let other sequences find the blocks that became full; return the new num_hashed_blocks.

        Call it only for tokens whose KV is written: after their step, and not for a failed row.
        The blocks are kept by `retention`, for a prompt of num_prompt_tokens.
        """
        num_full = num_computed_tokens // self._block_size
        for index in range(num_hashed_blocks, num_full):
            if block_ids[index] == NO_BLOCK:  # came back from the host without it
                continue
            start = index * self._block_size
            tokens = token_ids[start : start + self._block_size]
            parent_id = block_ids[index - 1] if index else None
            if self._prefix_cache.insert(block_ids[index], parent_id, tokens, kv_salt):
                self._pool.keep(block_ids[index])
            self._retain(block_ids[index], retention, index, num_prompt_tokens)
        return max(num_hashed_blocks, num_full)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Add one holder to each block: a fork takes over the block table."""
        self._pool.share(_without_gaps(block_ids))

    def is_shared(self, block_id: BlockId) -> bool:
        """Has it several holders? Then it must be copied before it is written."""
        return self._pool.ref_count(block_id) > 1

    def make_writable(
        self, block_ids: Sequence[BlockId], position: int
    ) -> tuple[BlockCopy, ...] | None:
        """Return what to copy before a block table's owner may write to a position of it.

        Empty if the block has no other holder. Otherwise the reference moves to a new block: the
        caller writes the copy's target into the table, and plans the copy. None and no change if
        no block is available.
        """
        source = block_ids[position // self._block_size]
        if not self.is_shared(source):
            return ()
        taken = self._pool.allocate(1)
        if taken is None:
            return None
        self._pool.release([source])
        return (BlockCopy(0, source, taken[0]),)

    def release_passed(
        self, block_ids: list[BlockId], num_computed_tokens: int, num_hashed_blocks: int
    ) -> None:
        """Free the blocks that no position from num_computed_tokens on sees, leaving gaps.

        Call it after `publish`. Without a window nothing changes.
        """
        if not self.has_window:
            return
        end = self._window.first_needed(num_computed_tokens, num_hashed_blocks)
        index = end - 1
        while index >= self._window.num_sink_blocks and block_ids[index] != NO_BLOCK:
            index -= 1
        first = max(index + 1, self._window.num_sink_blocks)
        self._pool.release(block_ids[first:end])
        block_ids[first:end] = [NO_BLOCK] * max(0, end - first)

    def offload(self, block_ids: Sequence[BlockId], num_computed_tokens: int) -> Offload | None:
        """Take host blocks for the computed part of a block table; return the transfers to plan.

        The table keeps its references: call `release` afterwards. None and no change if there are
        too few host blocks.
        """
        computed = block_ids[: self.num_blocks_for(num_computed_tokens)]
        taken = self._host.allocate(len(_without_gaps(computed)))
        if taken is None:
            return None
        free = iter(taken)
        host_block_ids = [b if b == NO_BLOCK else next(free) for b in computed]
        return Offload(host_block_ids, _transfers(computed, host_block_ids))

    def load_back(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        host_block_ids: Sequence[BlockId],
        num_computed_tokens: int,
        num_tokens: int,
        *,
        num_reserved_blocks: int = 0,
    ) -> Loaded | None:
        """Undo `offload`: take blocks for num_tokens tokens and load num_computed_tokens of KV.

        Blocks that the prefix cache still has are not transferred. The host blocks are free again,
        so a step's offloads are planned before its loads. None and no change if there are too few
        blocks; num_reserved_blocks must stay available.
        """
        found = self._prefix_cache.match(token_ids, kv_salt, num_computed_tokens)
        hits = [
            block_id if host_id != NO_BLOCK else NO_BLOCK
            for block_id, host_id in zip(found, host_block_ids, strict=False)
        ]
        rest = host_block_ids[len(hits) :]
        num_more = max(0, self.num_blocks_for(num_tokens) - len(host_block_ids))
        num_to_load = len(_without_gaps(rest))
        taken = self._share_and_take(hits, num_to_load + num_more, num_reserved_blocks)
        if taken is None:
            return None
        free = iter(taken)
        loaded = [b if b == NO_BLOCK else next(free) for b in rest]
        self.free_host(host_block_ids)
        return Loaded([*hits, *loaded, *free], _transfers(loaded, rest), len(hits))

    def free_host(self, host_block_ids: Sequence[BlockId]) -> None:
        """Free the host table of a sequence that ends, or will be computed again."""
        self._host.release(_without_gaps(host_block_ids))

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference to each block of a block table, in the table's order."""
        self._pool.release(_without_gaps(block_ids))

    def check(
        self,
        tables: Iterable[Sequence[BlockId]] | None = None,
        host_tables: Iterable[Sequence[BlockId]] | None = None,
    ) -> None:
        """Assert that no block is lost; with all tables that exist, also check the counts."""
        self._pool.check(tables)
        self._host.check(host_tables)
        self._prefix_cache.check()
        for block_id in range(self.num_blocks):
            assert self._pool.is_kept(block_id) == self._prefix_cache.serves(block_id), (
                f"block {block_id}: pool and prefix cache do not agree"
            )

    def _retain(
        self,
        block_id: BlockId,
        retention: KVRetention | None,
        index: int,
        num_prompt_tokens: int,
    ) -> None:
        if retention is None or block_id == NO_BLOCK:
            return
        of_block = block_retention(retention, index * self._block_size, num_prompt_tokens)
        if of_block is not None:
            self._pool.retain(block_id, of_block)

    def _forget(self, block_id: BlockId) -> None:
        forgotten = self._prefix_cache.forget(block_id)
        for orphan in forgotten.orphans:
            self._pool.drop(orphan)
        if forgotten.heir is not None:
            self._pool.keep(forgotten.heir)


def _without_gaps(block_ids: Sequence[BlockId]) -> list[BlockId]:
    return [block_id for block_id in block_ids if block_id != NO_BLOCK]


def _transfers(
    block_ids: Sequence[BlockId], host_block_ids: Sequence[BlockId]
) -> tuple[BlockTransfer, ...]:
    pairs = zip(block_ids, host_block_ids, strict=True)
    return tuple(BlockTransfer(0, *pair) for pair in pairs if pair[0] != NO_BLOCK)
