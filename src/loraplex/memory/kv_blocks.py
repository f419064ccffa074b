"""KV blocks for the scheduler: admit, grow, publish, share, offload, release.

KVBlocks joins the cache groups (holders) and the prefix cache (content). It keeps no state per
sequence: the scheduler owns the block tables. A call takes blocks in all groups or in none.
"""

import itertools
from collections.abc import Iterable, Sequence

from loraplex.core.cache import Blocks
from loraplex.core.plan import (
    NO_BLOCK,
    BlockCopy,
    BlockId,
    BlockTransfer,
    CacheGroupCapacity,
    CacheGroupId,
)
from loraplex.core.retention import KVRetention, block_retention
from loraplex.memory.block_tables import (
    AdmittedBlocks,
    BlockCounts,
    BlockTable,
    BlockTables,
    Loaded,
    NewBlocks,
    Offload,
)
from loraplex.memory.cache_group import CacheGroup, without_gaps
from loraplex.memory.cache_policy import longest_served
from loraplex.memory.kv_salt import LaterSalts, salt_before
from loraplex.memory.prefix_cache import PrefixCache


class KVBlocks:
    """The KV blocks of all cache groups, and the prefix cache."""

    def __init__(
        self,
        block_size: int,
        cache_groups: Sequence[CacheGroupCapacity],
        *,
        prefix_caching: bool = True,
        state_checkpoint_tokens: int = 0,
    ) -> None:
        """block_size, cache_groups: as in Capacity; state_checkpoint_tokens: as in the settings.

        Without a group that has a block of all positions first, there is no prefix caching.
        """
        self.block_size = block_size
        """Tokens per block."""
        self.prefix_caching = prefix_caching and can_cache_prefixes(cache_groups)
        """Whether sequences begin with blocks that others have computed."""
        self._prefix_cache = PrefixCache(block_size, len(cache_groups), enabled=self.prefix_caching)
        self.groups = tuple(
            CacheGroup(group_id, block_size, capacity, self._forget, state_checkpoint_tokens)
            for group_id, capacity in enumerate(cache_groups)
        )
        self.is_sparse = any(group.is_sparse for group in self.groups)
        """Whether a group has gaps, and no row may read what another one of its step writes."""
        self.frees_early = any(group.frees_early for group in self.groups)
        """Whether sequences free blocks before they end."""
        self._policies = [group.policy for group in self.groups]
        self.no_new: NewBlocks = ((),) * len(self.groups)
        """No block for any group."""
        # `fits` is called for every row of every step, and most models have one group.
        self._only_block_size = 0 if self.is_sparse or len(self.groups) > 1 else block_size

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

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int = 0) -> BlockCounts:
        """Return the number of blocks that num_tokens computed tokens fill or touch.

        Groups of the encoder's positions have blocks for num_encoder_tokens instead.
        """
        return tuple(group.num_blocks_for(num_tokens, num_encoder_tokens) for group in self.groups)

    def num_missing(
        self,
        block_tables: BlockTables,
        num_tokens: int,
        num_certain_tokens: int | None = None,
        num_encoder_tokens: int = 0,
    ) -> BlockCounts:
        """Return the number of blocks that block tables must take for num_tokens tokens.

        num_certain_tokens: what a step to num_tokens computes at least; None: all but one.
        num_encoder_tokens: 0 for a sequence that was admitted with all blocks of these positions.
        """
        certain = num_tokens - 1 if num_certain_tokens is None else num_certain_tokens
        lengths = map(len, block_tables) if block_tables else itertools.repeat(0)
        return tuple(
            group.num_missing(length, num_tokens, certain, num_encoder_tokens)
            for group, length in zip(self.groups, lengths, strict=False)
        )

    def num_fitting(self, block_tables: BlockTables, num_tokens: int, num_to_leave: int) -> int:
        """Return how many tokens fit in block tables that grow for up to num_tokens tokens.

        num_to_leave: blocks of each group that must stay available.
        """
        missing = self.num_missing(block_tables, num_tokens, 0)
        return min(
            group.num_fitting(len(table), num_missing, num_to_leave)
            for (group, table), num_missing in zip(self._pairs(block_tables), missing, strict=True)
        )

    def max_blocks_held(
        self, num_tokens: int, max_step_tokens: int, num_encoder_tokens: int = 0
    ) -> BlockCounts:
        """Return the maximum number of blocks that a sequence of num_tokens tokens holds at once.

        max_step_tokens: maximum number of tokens in one step, each followed by `release_passed`.
        Without a window the result is num_blocks_for(num_tokens).
        """
        return tuple(
            group.policy.max_held(
                num_encoder_tokens if group.is_of_encoder else num_tokens, max_step_tokens
            )
            for group in self.groups
        )

    def shortage(self, num_blocks: BlockCounts) -> str | None:
        """Return how a need of blocks exceeds what there is in a group; None if it does not."""
        for group, num_needed in zip(self.groups, num_blocks, strict=True):
            if num_needed > group.num_blocks:
                place = ""
                if len(self.groups) > 1:
                    kind = f"{group.spec.name} tokens"
                    if group.spec.reach is None:
                        kind = group.spec.name if group.is_of_encoder else "full attention"
                    place = f" for the layers with {kind}"
                return (
                    f"{num_needed} KV blocks of {group.block_size} tokens{place}; there are "
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
        later_salts: LaterSalts = (),
        num_reserved_blocks: BlockCounts = (),
        retention: KVRetention | None = None,
        num_prompt_tokens: int = 0,
        num_encoder_tokens: int = 0,
        donor: BlockTables | None = None,
    ) -> AdmittedBlocks | None:
        """Return blocks for a sequence that has none: a new one, or one preempted before.

        Serves the longest cached beginning, but never the last token: one is always left to
        compute. Then takes blocks for up to max_new_tokens (>= 1) of the tokens after it, with a
        window for up to max_step_tokens. Groups without a window must nevertheless have blocks for
        max_new_tokens. None and no change if there are too few blocks; num_reserved_blocks must
        stay available in each group. max_cached_tokens = 0 serves nothing (prompt log probabilities
        need every position). later_salts: as of PrefixCache.match.
        `retention`, for a prompt of num_prompt_tokens, applies to served blocks from now on.

        In groups of the encoder's positions it takes blocks for all num_encoder_tokens, or shares
        those of the donor: tables of a sequence with the same encoder input, if there is one.
        """
        assert token_ids, "an empty sequence"
        assert max_new_tokens > 0, "nothing to compute"
        most = len(token_ids) if max_cached_tokens is None else max_cached_tokens
        limit = min(len(token_ids) - 1, most)
        found = self._prefix_cache.match(token_ids, kv_salt, limit, later_salts)
        num_served = longest_served(self._policies, found)
        num_cached = num_served * self.block_size
        num_new = min(max_new_tokens, len(token_ids) - num_cached)
        num_first = self._num_first(num_new, max_step_tokens)
        hits = [
            _of_donor(group, donor)
            if group.is_of_encoder
            else group.needed(group.of_cached_blocks(table[:num_served]), num_cached)
            for group, table in zip(self.groups, found, strict=True)
        ]
        certain = min(num_cached + num_first, len(token_ids) - 1)
        num_to_take = self.num_missing(hits, num_cached + num_first, certain, num_encoder_tokens)
        num_to_leave = self._num_later(hits, num_cached + num_new, num_to_take)
        if not self._share_hits(hits, num_to_take, num_to_leave, num_reserved_blocks):
            return None
        tables = [
            table + group.take(num_taken)
            if group.is_of_encoder
            else table + group.extend(table, num_cached + num_first, certain, group.num_available)
            for group, table, num_taken in zip(self.groups, hits, num_to_take, strict=True)
        ]
        for group, table in zip(self.groups, hits, strict=True):
            for index, block_id in enumerate(table):
                self._retain(group, block_id, retention, index, num_prompt_tokens)
        num_to_encode = num_encoder_tokens if donor is None else 0
        return AdmittedBlocks(tables, num_cached, num_first, num_to_encode)

    def fits(self, block_tables: BlockTables, num_tokens: int) -> bool:
        """Return whether num_tokens tokens fit in the block tables of a sequence."""
        if self._only_block_size and block_tables:
            return len(block_tables[0]) * self._only_block_size >= num_tokens
        for group, table in self._pairs(block_tables):
            if len(table) * group.block_size + group.num_open < num_tokens:
                return False
        return True

    def grow(
        self,
        block_tables: BlockTables,
        num_tokens: int,
        num_certain_tokens: int | None = None,
        num_to_leave: int = 0,
    ) -> NewBlocks | None:
        """Return the blocks to append to block tables so that num_tokens tokens fit.

        Empty if they fit already; None and no change if there are not enough blocks.
        num_certain_tokens: as in `num_missing`. num_to_leave: blocks that stay available when
        checkpoints are taken.
        """
        if self.fits(block_tables, num_tokens):
            return self.no_new
        certain = num_tokens - 1 if num_certain_tokens is None else num_certain_tokens
        num_missing = self.num_missing(block_tables, num_tokens, certain)
        pairs = zip(self.groups, num_missing, strict=True)
        if any(group.num_available < count for group, count in pairs):
            return None
        return tuple(
            tuple(group.extend(table, num_tokens, certain, num_to_leave))
            for group, table in self._pairs(block_tables)
        )

    def fit(
        self,
        block_tables: BlockTables,
        num_computed_tokens: int,
        num_tokens: int,
        num_certain_tokens: int,
        num_to_leave: int,
    ) -> None:
        """Let tables that no step has used have the states of a step up to num_tokens tokens.

        They were taken for a longer step, so there are enough. The parameters are those of `grow`.
        """
        for group, table in self._pairs(block_tables):
            if group.is_sparse:
                first = group.num_blocks_for(num_computed_tokens)
                group.release(table[first:])
                del table[first:]
                table += group.extend(table, num_tokens, num_certain_tokens, num_to_leave)

    def publish(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        block_tables: BlockTables,
        num_hashed_blocks: int,
        num_computed_tokens: int,
        *,
        later_salts: LaterSalts = (),
        retention: KVRetention | None = None,
        num_prompt_tokens: int = 0,
    ) -> int:
        """Let other sequences find the blocks that became full; return the new num_hashed_blocks.

        Call it only for tokens whose KV is written: after their step, and not for a failed row.
        The blocks are kept by `retention`, for a prompt of num_prompt_tokens.
        """
        num_full = num_computed_tokens // self.block_size
        if not self.prefix_caching:
            return max(num_hashed_blocks, num_full)
        first_table = block_tables[0]
        for index in range(num_hashed_blocks, num_full):
            if first_table[index] == NO_BLOCK:  # came back from the host without it
                continue
            start = index * self.block_size
            tokens = token_ids[start : start + self.block_size]
            parent_id = first_table[index - 1] if index else None
            block_ids = [
                group.published(table, index, num_prompt_tokens)
                for group, table in self._pairs(block_tables)
            ]
            salt = salt_before(start + self.block_size, kv_salt, later_salts)
            for group_id in self._prefix_cache.insert(block_ids, parent_id, tokens, salt):
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
        """Make a position of block tables writable for their owner; return the copies to plan.

        Empty if the blocks have no other holder. Otherwise the reference moves to a new block, and
        the table names that. None and no change if no block is available.
        """
        shared = [
            (group, table, index)
            for group, table in self._pairs(block_tables)
            if group.policy.is_writable(position)
            and (index := position // group.block_size) < len(table)
            and group.pool.ref_count(table[index]) > 1
        ]
        if any(not group.num_available for group, *_ in shared):
            return None
        copies = []
        for group, table, index in shared:
            source = table[index]
            (table[index],) = group.take(1)
            group.pool.release([source])
            copies.append(BlockCopy(group.group_id, source, table[index]))
        return tuple(copies)

    def release_passed(
        self, block_tables: BlockTables, num_computed_tokens: int, num_released_tokens: int = 0
    ) -> None:
        """Free the blocks that no position from num_computed_tokens on reads, leaving gaps.

        Call it after `publish` of all these tokens. Without a window nothing changes.
        num_released_tokens: tokens for which it was called before.
        """
        if self.frees_early:
            for group, table in self._pairs(block_tables):
                group.release_passed(table, num_computed_tokens, num_released_tokens)

    def offload(self, block_tables: BlockTables, num_computed_tokens: int) -> Offload | None:
        """Take host blocks for the computed part of block tables; return the transfers to plan.

        The tables keep their references: call `release` afterwards. None and no change if there are
        too few host blocks.
        """
        size = self.block_size
        computed = [
            (group, table[: group.num_blocks_for(num_computed_tokens, len(table) * size)])
            for group, table in self._pairs(block_tables)
        ]
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
        later_salts: LaterSalts = (),
        max_step_tokens: int | None = None,
        num_reserved_blocks: BlockCounts = (),
        donor: BlockTables | None = None,
    ) -> Loaded | None:
        """Undo `offload`: take blocks for num_tokens tokens and load num_computed_tokens of KV.

        Blocks that the prefix cache or the donor has are not transferred. The host blocks are free
        again, so a step's offloads are planned before its loads. None and no change if there are
        too few blocks; max_step_tokens, num_reserved_blocks and donor are as in `admit`.
        """
        found = self._prefix_cache.match(token_ids, kv_salt, num_computed_tokens, later_salts)
        hits = self._host_hits(found, host_tables, donor)
        num_first = self._num_first(num_tokens - num_computed_tokens, max_step_tokens)
        num_fitting = num_computed_tokens + num_first
        certain = min(num_fitting, num_tokens - 1)
        num_more = self.num_missing(host_tables, num_fitting, certain)
        # The table of a donor is as long as that of the host: nothing of it remains.
        rests = [table[len(its_hits) :] for table, its_hits in zip(host_tables, hits, strict=True)]
        num_to_take = [
            len(without_gaps(rest)) + count for rest, count in zip(rests, num_more, strict=True)
        ]
        num_to_leave = self._num_later(host_tables, num_tokens, num_more)
        if not self._share_hits(hits, num_to_take, num_to_leave, num_reserved_blocks):
            return None
        block_tables: BlockTables = []
        transfers: list[BlockTransfer] = []
        for group, its_hits, rest in zip(self.groups, hits, rests, strict=True):
            loaded = group.load_back(rest)
            transfers.extend(group.transfers(loaded, rest))
            table = its_hits + loaded
            table += group.extend(table, num_fitting, certain, group.num_available)
            block_tables.append(table)
        self.free_host(host_tables)
        return Loaded(block_tables, tuple(transfers), len(hits[0]))

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
        for group in self.groups:
            group.check(_tables_of(group, tables), _tables_of(group, host_tables))
            differing = group.pool.kept ^ self._prefix_cache.served(group.group_id)
            assert not differing, (
                f"blocks {sorted(differing)} of cache group {group.group_id}: pool and prefix "
                "cache do not agree"
            )

    def _host_hits(
        self, found: BlockTables, host_tables: BlockTables, donor: BlockTables | None
    ) -> BlockTables:
        """Return the found blocks before the first that only the host has, with its gaps."""
        num_hits = len(found[0])
        tables = [
            group.of_cached_blocks(table) for group, table in zip(self.groups, found, strict=True)
        ]
        for group, table, host_table in zip(self.groups, tables, host_tables, strict=True):
            if group.is_of_encoder:
                continue
            for index, (block_id, host_block) in enumerate(zip(table, host_table, strict=False)):
                if block_id == NO_BLOCK and host_block != NO_BLOCK:
                    num_hits = min(num_hits, group.num_cached_blocks_before(index))
                    break
        return [
            _of_donor(group, donor)
            if group.is_of_encoder
            else [
                NO_BLOCK if host_block == NO_BLOCK else block_id
                for block_id, host_block in zip(
                    group.of_cached_blocks(table[:num_hits]), host_table, strict=False
                )
            ]
            for group, table, host_table in zip(self.groups, found, host_tables, strict=True)
        ]

    def _pairs(self, block_tables: BlockTables) -> Iterable[tuple[CacheGroup, BlockTable]]:
        """Return each group with its table; nothing of a sequence without blocks."""
        return zip(self.groups, block_tables, strict=True) if block_tables else ()

    def _num_later(
        self, block_tables: BlockTables, num_tokens: int, num_taken: BlockCounts
    ) -> BlockCounts:
        """Return how many blocks must be there for num_tokens tokens in addition to num_taken.

        With a window a group frees blocks before it takes others, and blocks of the encoder's
        positions are taken all at once.
        """
        counts = zip(
            self.groups, self.num_missing(block_tables, num_tokens), num_taken, strict=True
        )
        return tuple(
            0 if group.frees_early or group.is_of_encoder else num_missing - count
            for group, num_missing, count in counts
        )

    def _num_first(self, num_new_tokens: int, max_step_tokens: int | None) -> int:
        """Return for how many new tokens a sequence takes blocks when it is admitted."""
        if max_step_tokens is None or not self.frees_early:
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
        group: CacheGroup,
        block_id: BlockId,
        retention: KVRetention | None,
        index: int,
        num_prompt_tokens: int,
    ) -> None:
        if retention is None or block_id == NO_BLOCK:
            return
        of_block = block_retention(retention, index * self.block_size, num_prompt_tokens)
        if of_block is not None:
            group.pool.retain(block_id, of_block)

    def _forget(self, group_id: CacheGroupId, block_id: BlockId) -> None:
        forgotten = self._prefix_cache.forget(group_id, block_id)
        for orphan_group_id, orphan in forgotten.orphans:
            self.groups[orphan_group_id].pool.drop(orphan)
        if forgotten.heir is not None:
            self.groups[group_id].pool.keep(forgotten.heir)


def can_cache_prefixes(cache_groups: Sequence[CacheGroupCapacity]) -> bool:
    """Return whether a model with these groups can have a prefix cache.

    The first group must have a block of all positions: a node of the prefix cache is known by it.
    """
    return isinstance(cache_groups[0].spec, Blocks)


def _of_donor(group: CacheGroup, donor: BlockTables | None) -> BlockTable:
    """Return the blocks that a sequence shares with the donor, if there is one."""
    return [] if donor is None else donor[group.group_id]


def _tables_of(group: CacheGroup, tables: Sequence[BlockTables] | None) -> list[BlockTable] | None:
    return None if tables is None else [one[group.group_id] for one in tables if one]
