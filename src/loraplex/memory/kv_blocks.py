"""KV blocks for the scheduler: admit, grow, publish, share, offload, release.

KVBlocks joins the KV groups (holders) and the prefix cache (content). It keeps no state per
sequence: the scheduler owns the block tables. A call takes blocks in all groups or in none.
"""

from collections.abc import Iterable, Sequence

from loraplex.core.plan import (
    NO_BLOCK,
    BlockCopy,
    BlockId,
    BlockTransfer,
    KVGroupCapacity,
    KVGroupId,
)
from loraplex.core.retention import KVRetention, block_retention
from loraplex.memory.attention_window import longest_served
from loraplex.memory.block_tables import (
    AdmittedBlocks,
    BlockCounts,
    BlockTable,
    BlockTables,
    Loaded,
    NewBlocks,
    Offload,
)
from loraplex.memory.kv_group import KVGroup, without_gaps
from loraplex.memory.prefix_cache import HashFunction, PrefixCache, hash_block


class KVBlocks:
    """The KV blocks of all KV groups, and the prefix cache."""

    def __init__(
        self,
        block_size: int,
        kv_groups: Sequence[KVGroupCapacity],
        *,
        prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
    ) -> None:
        """block_size, kv_groups: as in Capacity."""
        self._block_size = block_size
        self._prefix_cache = PrefixCache(
            block_size, len(kv_groups), enabled=prefix_caching, hash_function=hash_function
        )
        self.groups = tuple(
            KVGroup(group_id, block_size, capacity, self._forget)
            for group_id, capacity in enumerate(kv_groups)
        )
        self.has_window = any(group.has_window for group in self.groups)
        """Whether sequences free blocks before they end."""
        self._windows = [group.window for group in self.groups]
        self._no_new: NewBlocks = ((),) * len(self.groups)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_free(self) -> int:
        """Number of free blocks in all groups together."""
        return sum(group.pool.num_free for group in self.groups)

    @property
    def num_cached(self) -> int:
        return sum(group.pool.num_cached for group in self.groups)

    @property
    def num_held(self) -> int:
        return sum(group.pool.num_held for group in self.groups)

    @property
    def num_on_host(self) -> int:
        """Number of host blocks that hold the KV of preempted sequences."""
        return sum(group.host.num_held for group in self.groups)

    @property
    def num_available(self) -> BlockCounts:
        """Number of blocks that can be taken now: free and cached ones."""
        return tuple(group.num_available for group in self.groups)

    def advance(self, now_ns: int) -> None:
        """Set the present time, by which the durations of retained blocks begin and end."""
        for group in self.groups:
            group.pool.advance(now_ns)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that num_tokens computed tokens fill or touch."""
        return -(-num_tokens // self._block_size)

    def max_blocks_held(self, num_tokens: int, max_step_tokens: int) -> BlockCounts:
        """Return the maximum number of blocks that a sequence of num_tokens tokens holds at once.

        max_step_tokens: maximum number of tokens in one step, each followed by `release_passed`.
        Without a window the result is num_blocks_for(num_tokens).
        """
        return tuple(
            group.window.max_blocks_held(num_tokens, max_step_tokens) for group in self.groups
        )

    def shortage(self, num_blocks: BlockCounts) -> str | None:
        """Return how a need of blocks exceeds what there is in a group; None if it does not."""
        for group, num_needed in zip(self.groups, num_blocks, strict=True):
            if num_needed > group.num_blocks:
                place = ""
                if len(self.groups) > 1:
                    window = group.window.num_tokens
                    kind = "full attention" if window is None else f"a window of {window} tokens"
                    place = f" for the layers with {kind}"
                return (
                    f"{num_needed} KV blocks of {self._block_size} tokens{place}; there are "
                    f"{group.num_blocks}"
                )
        return None

    def admit(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        max_new_tokens: int,
        *,
        max_step_tokens: int | None = None,
        max_cached_tokens: int | None = None,
        num_reserved_blocks: BlockCounts = (),
        retention: KVRetention | None = None,
        num_prompt_tokens: int = 0,
    ) -> AdmittedBlocks | None:
        """Return blocks for a sequence that has none: a new one, or one preempted before.

        Serves the longest cached beginning, but never the last token: one is always left to
        compute. Then takes blocks for up to max_new_tokens (>= 1) of the tokens after it, with a
        window for up to max_step_tokens. Groups without a window must nevertheless have blocks for
        max_new_tokens. None and no change if there are too few blocks; num_reserved_blocks must
        stay available in each group.

        max_cached_tokens = 0 serves nothing (prompt log probabilities need every position).
        `retention`, for a prompt of num_prompt_tokens, applies to served blocks from now on.
        """
        assert token_ids, "an empty sequence"
        assert max_new_tokens > 0, "nothing to compute"
        limit = len(token_ids) - 1
        if max_cached_tokens is not None:
            limit = min(limit, max_cached_tokens)
        found = self._prefix_cache.match(token_ids, kv_salt, limit)
        num_served = longest_served(self._windows, found)
        num_cached = num_served * self._block_size
        num_new = min(max_new_tokens, len(token_ids) - num_cached)
        num_first = self._num_first(num_new, max_step_tokens)
        hits = [
            group.needed(table[:num_served], num_cached)
            for group, table in zip(self.groups, found, strict=True)
        ]
        num_to_take = self.num_blocks_for(num_cached + num_first) - num_served
        num_to_fit = self.num_blocks_for(num_cached + num_new) - num_served
        num_to_leave = [
            (0 if group.has_window else num_to_fit - num_to_take) for group in self.groups
        ]
        if not self._share_hits(hits, [num_to_take] * len(hits), num_to_leave, num_reserved_blocks):
            return None
        tables = [
            table + group.take(num_to_take) for group, table in zip(self.groups, hits, strict=True)
        ]
        for group, table in zip(self.groups, hits, strict=True):
            for index, block_id in enumerate(table):
                self._retain(group, block_id, retention, index, num_prompt_tokens)
        return AdmittedBlocks(tables, num_cached, num_first)

    def grow(self, block_tables: BlockTables, num_tokens: int) -> NewBlocks | None:
        """Return the blocks to append to block tables so that num_tokens tokens fit.

        Empty if they fit already; None and no change if there are not enough blocks.
        """
        num_missing = self.num_blocks_for(num_tokens) - len(block_tables[0])
        if num_missing <= 0:
            return self._no_new
        if any(group.num_available < num_missing for group in self.groups):
            return None
        return tuple(tuple(group.take(num_missing)) for group in self.groups)

    def publish(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        block_tables: BlockTables,
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
        first_table = block_tables[0]
        for index in range(num_hashed_blocks, num_full):
            if first_table[index] == NO_BLOCK:  # came back from the host without it
                continue
            start = index * self._block_size
            tokens = token_ids[start : start + self._block_size]
            parent_id = first_table[index - 1] if index else None
            block_ids = [table[index] for table in block_tables]
            for group_id in self._prefix_cache.insert(block_ids, parent_id, tokens, kv_salt):
                self.groups[group_id].pool.keep(block_ids[group_id])
            for group, block_id in zip(self.groups, block_ids, strict=True):
                self._retain(group, block_id, retention, index, num_prompt_tokens)
        return max(num_hashed_blocks, num_full)

    def share(self, block_tables: BlockTables) -> None:
        """Add one holder to each block: a fork takes over the block tables."""
        for group, table in self._pairs(block_tables):
            group.share(table)

    def make_writable(
        self, block_tables: BlockTables, position: int
    ) -> tuple[BlockCopy, ...] | None:
        """Return what to copy before the owner of block tables may write to a position of them.

        Empty if the blocks have no other holder. Otherwise the reference moves to a new block: the
        caller writes each copy's target into the group's table, and plans the copy. None and no
        change if no block is available.
        """
        index = position // self._block_size
        shared = [
            (group, table[index])
            for group, table in self._pairs(block_tables)
            if group.pool.ref_count(table[index]) > 1
        ]
        if any(not group.num_available for group, _ in shared):
            return None
        copies = []
        for group, source in shared:
            (target,) = group.take(1)
            group.pool.release([source])
            copies.append(BlockCopy(group.group_id, source, target))
        return tuple(copies)

    def release_passed(
        self, block_tables: BlockTables, num_computed_tokens: int, num_hashed_blocks: int
    ) -> None:
        """Free the blocks that no position from num_computed_tokens on sees, leaving gaps.

        Call it after `publish`. Without a window nothing changes.
        """
        if self.has_window:
            for group, table in self._pairs(block_tables):
                group.release_passed(table, num_computed_tokens, num_hashed_blocks)

    def offload(self, block_tables: BlockTables, num_computed_tokens: int) -> Offload | None:
        """Take host blocks for the computed part of block tables; return the transfers to plan.

        The tables keep their references: call `release` afterwards. None and no change if there are
        too few host blocks.
        """
        num_blocks = self.num_blocks_for(num_computed_tokens)
        computed = [(group, table[:num_blocks]) for group, table in self._pairs(block_tables)]
        if any(len(without_gaps(table)) > group.host.num_free for group, table in computed):
            return None
        host_tables: BlockTables = []
        transfers: list[BlockTransfer] = []
        for group, table in computed:
            host_tables.append(group.offload(table))
            transfers.extend(group.transfers(table, host_tables[-1]))
        return Offload(host_tables, tuple(transfers))

    def load_back(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        host_tables: BlockTables,
        num_computed_tokens: int,
        num_tokens: int,
        *,
        max_step_tokens: int | None = None,
        num_reserved_blocks: BlockCounts = (),
    ) -> Loaded | None:
        """Undo `offload`: take blocks for num_tokens tokens and load num_computed_tokens of KV.

        Blocks that the prefix cache still has are not transferred. The host blocks are free again,
        so a step's offloads are planned before its loads. None and no change if there are too few
        blocks; max_step_tokens and num_reserved_blocks are as in `admit`.
        """
        found = self._prefix_cache.match(token_ids, kv_salt, num_computed_tokens)
        hits = _hits(found, host_tables)
        num_hits = len(hits[0])
        num_first = self._num_first(num_tokens - num_computed_tokens, max_step_tokens)
        num_on_host = len(host_tables[0])
        num_more = max(0, self.num_blocks_for(num_computed_tokens + num_first) - num_on_host)
        num_to_fit = max(0, self.num_blocks_for(num_tokens) - num_on_host)
        rests = [table[num_hits:] for table in host_tables]
        num_to_take = [len(without_gaps(rest)) + num_more for rest in rests]
        num_to_leave = [(0 if group.has_window else num_to_fit - num_more) for group in self.groups]
        if not self._share_hits(hits, num_to_take, num_to_leave, num_reserved_blocks):
            return None
        block_tables: BlockTables = []
        transfers: list[BlockTransfer] = []
        for group, its_hits, rest in zip(self.groups, hits, rests, strict=True):
            loaded = group.load_back(rest, num_more)
            block_tables.append(its_hits + loaded)
            transfers.extend(group.transfers(loaded, rest))
        self.free_host(host_tables)
        return Loaded(block_tables, tuple(transfers), num_hits)

    def free_host(self, host_tables: BlockTables) -> None:
        """Free the host tables of a sequence that ends, or will be computed again."""
        for group, table in self._pairs(host_tables):
            group.free_host(table)

    def release(self, block_tables: BlockTables) -> None:
        """Drop one reference to each block of block tables, in the tables' order."""
        for group, table in self._pairs(block_tables):
            group.release(table)

    def check(
        self,
        tables: Sequence[BlockTables] | None = None,
        host_tables: Sequence[BlockTables] | None = None,
    ) -> None:
        """Assert that no block is lost; with all tables that exist, also check the counts."""
        self._prefix_cache.check()
        for one in (*(tables or ()), *(host_tables or ())):
            assert len({len(table) for table in one}) <= 1, "tables of different lengths"
        for group in self.groups:
            group.check(_tables_of(group, tables), _tables_of(group, host_tables))
            for block_id in range(group.num_blocks):
                is_served = self._prefix_cache.serves(group.group_id, block_id)
                assert group.pool.is_kept(block_id) == is_served, (
                    f"block {block_id} of KV group {group.group_id}: pool and prefix cache do not "
                    "agree"
                )

    def _pairs(self, block_tables: BlockTables) -> Iterable[tuple[KVGroup, BlockTable]]:
        """Return each group with its table; nothing of a sequence without blocks."""
        return zip(self.groups, block_tables, strict=True) if block_tables else ()

    def _num_first(self, num_new_tokens: int, max_step_tokens: int | None) -> int:
        """Return for how many new tokens a sequence takes blocks when it is admitted."""
        if max_step_tokens is None or not self.has_window:
            return num_new_tokens
        return min(num_new_tokens, max_step_tokens)

    def _share_hits(
        self,
        hits: BlockTables,
        num_to_take: Sequence[int],
        num_to_leave: Sequence[int],
        num_reserved_blocks: BlockCounts,
    ) -> bool:
        """Share the hits if blocks can be taken after that; False and no change if not."""
        reserved = num_reserved_blocks or (0,) * len(self.groups)
        wanted = zip(self.groups, hits, num_to_take, num_to_leave, reserved, strict=True)
        if not all(group.has_space(table, sum(counts)) for group, table, *counts in wanted):
            return False
        # The hits of all groups are shared before blocks are taken: taking must not evict them.
        self.share(hits)
        return True

    def _retain(
        self,
        group: KVGroup,
        block_id: BlockId,
        retention: KVRetention | None,
        index: int,
        num_prompt_tokens: int,
    ) -> None:
        if retention is None or block_id == NO_BLOCK:
            return
        of_block = block_retention(retention, index * self._block_size, num_prompt_tokens)
        if of_block is not None:
            group.pool.retain(block_id, of_block)

    def _forget(self, group_id: KVGroupId, block_id: BlockId) -> None:
        forgotten = self._prefix_cache.forget(group_id, block_id)
        for orphan_group_id, orphan in forgotten.orphans:
            self.groups[orphan_group_id].pool.drop(orphan)
        if forgotten.heir is not None:
            self.groups[group_id].pool.keep(forgotten.heir)


def _hits(found: BlockTables, host_tables: BlockTables) -> BlockTables:
    """Return the found blocks before the first that only the host has, with the host's gaps."""
    num_hits = len(found[0])
    for table, host_table in zip(found, host_tables, strict=True):
        for index in range(num_hits):
            if table[index] == NO_BLOCK and host_table[index] != NO_BLOCK:
                num_hits = index
                break
    return [
        [NO_BLOCK if host_table[i] == NO_BLOCK else table[i] for i in range(num_hits)]
        for table, host_table in zip(found, host_tables, strict=True)
    ]


def _tables_of(group: KVGroup, tables: Sequence[BlockTables] | None) -> list[BlockTable] | None:
    return None if tables is None else [one[group.group_id] for one in tables if one]
