"""Blocks of a sequence that attention will read again, if it sees only a window and sinks."""

import dataclasses
from collections.abc import Sequence

from loraplex.core.plan import NO_BLOCK, BlockId


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Window of attention: position p sees p - num_tokens + 1 .. p and 0 .. num_sink_tokens - 1."""

    block_size: int
    num_tokens: int | None
    """None: everything before it."""
    num_sink_tokens: int = 0

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.num_sink_tokens // self.block_size)

    def first_needed(self, num_computed_tokens: int, num_hashed_blocks: int) -> int:
        """Return the first block after the sinks that later positions read.

        The last block that the prefix cache has stays: the next one is found through it.
        """
        if self.num_tokens is None:
            return 0
        first_seen = max(0, num_computed_tokens - self.num_tokens + 1)
        return max(0, min(first_seen // self.block_size, num_hashed_blocks - 1))

    def needs(self, index: int, first_needed: int) -> bool:
        """Return whether later positions read block `index` of a table."""
        return index >= first_needed or index < self.num_sink_blocks

    def max_blocks_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of num_tokens tokens needs at once.

        max_step_tokens: maximum number of tokens in one step. From a step's first position N the
        window reaches back to N - W + 1, and the step writes up to N + max_step_tokens - 1.
        """
        all_blocks = -(-num_tokens // self.block_size)
        if self.num_tokens is None:
            return all_blocks
        ahead = min(num_tokens, max_step_tokens) - 1
        seen = -(-(self.num_tokens - 1 + ahead) // self.block_size) + 1
        with_the_last_hashed = -(-ahead // self.block_size) + 2
        return min(all_blocks, self.num_sink_blocks + max(seen, with_the_last_hashed))


def longest_served(windows: Sequence[AttentionWindow], tables: Sequence[Sequence[BlockId]]) -> int:
    """Return with how many of the blocks that a prefix cache has a sequence can begin.

    The tables are those of PrefixCache.match, one for each window. After n blocks, a table must
    have those of them that its window still needs. The first table has no gaps.
    """
    num_blocks = len(tables[0])
    pairs = list(zip(windows, tables, strict=True))[1:]
    for window, table in pairs:
        sinks = table[: min(window.num_sink_blocks, num_blocks)]
        if NO_BLOCK in sinks:
            num_blocks = sinks.index(NO_BLOCK)
    # A gap that is needed shortens the beginning, and a shorter one needs earlier blocks. So the
    # tables are read from their ends, each block at most once.
    checked = [num_blocks] * len(pairs)
    before = -1
    while num_blocks != before:
        before = num_blocks
        for number, (window, table) in enumerate(pairs):
            first_needed = window.first_needed(num_blocks * window.block_size, num_blocks)
            index = min(checked[number], num_blocks)
            while index > first_needed:
                index -= 1
                if table[index] == NO_BLOCK:
                    num_blocks = index
            checked[number] = index
    return num_blocks
