"""Which blocks of a cache group a sequence takes, which of them later positions read, and which
beginnings the prefix cache can serve: one policy for each kind of `CacheSpec`.
"""

import abc
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from loraplex.core.cache import Blocks, CacheSpec, Chunk, Cross, States
from loraplex.core.plan import NO_BLOCK, BlockId


class Needed(NamedTuple):
    """Entries of a block table that later positions read: the first ones, and all from one on."""

    num_first: int
    since: int

    def includes(self, index: int) -> bool:
        return index >= self.since or index < self.num_first


class CachePolicy(Protocol):
    """Rules of one cache group. An index is that of an entry of a block table."""

    @property
    def block_size(self) -> int:
        """Number of positions from one entry to the next."""
        ...

    @property
    def is_sparse(self) -> bool:
        """Whether entries that no step ends at are gaps, as those of states are.

        Such an entry is complete with its last position. No row reads what another row of its step
        writes there.
        """
        ...

    @property
    def is_of_encoder(self) -> bool:
        """Whether the positions are those of the encoder's input, and not the sequence's own.

        Then the sequence takes all blocks when it is admitted, and its tokens change nothing.
        """
        ...

    @property
    def frees_early(self) -> bool:
        """Whether sequences free blocks before they end."""
        ...

    def serves(self, table: Sequence[BlockId], num_blocks: int) -> int:
        """Return with how many blocks, up to num_blocks, a sequence can begin.

        table: what the prefix cache has, with gaps, in blocks of Capacity.block_size tokens. After
        n blocks, those that are still needed must be there.
        """
        ...

    def needed(self, num_computed_tokens: int) -> Needed:
        """Return the entries that positions from num_computed_tokens on read.

        The last full block is always one of them: the prefix cache finds the next one through it.
        """
        ...

    def takes(self, start: int, end: int) -> range:
        """Return the entries that hold the positions from start up to end."""
        ...

    def first_taken(self, num_certain_tokens: int) -> int:
        """Return the first entry that no step may leave out which ends from these tokens on."""
        ...

    def is_published(self, index: int, num_prompt_tokens: int) -> bool:
        """Return whether the prefix cache gets the block of an entry.

        num_prompt_tokens: of the sequence; 0: not known.
        """
        ...

    def max_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of num_tokens tokens needs at once.

        max_step_tokens: maximum number of tokens in one step.
        """
        ...

    def is_writable(self, position: int) -> bool:
        """Return whether a sequence writes to the block of a position that it computes.

        Then a fork must have a block of its own there.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _NewestPositions(abc.ABC):
    """Policy of blocks of positions of which the newest are read, and maybe the first ones."""

    is_sparse: ClassVar = False
    is_of_encoder: ClassVar = False
    block_size: int
    reach: int | None
    """Maximum number of newest positions that a position reads, itself included; None: all."""
    num_sink_blocks: int

    @property
    def frees_early(self) -> bool:
        return self.reach is not None

    @abc.abstractmethod
    def first_read(self, num_computed_tokens: int) -> int:
        """Return the first position that later ones read; negative: all of them are read."""

    def serves(self, table: Sequence[BlockId], num_blocks: int) -> int:
        sinks = table[: min(self.num_sink_blocks, num_blocks)]
        if NO_BLOCK in sinks:
            num_blocks = sinks.index(NO_BLOCK)
        # A gap that is needed shortens the beginning, and a shorter one needs earlier blocks. So
        # the table is read from its end, each block at most once.
        since = self.needed(num_blocks * self.block_size).since
        index = num_blocks
        while index > since:
            index -= 1
            if table[index] == NO_BLOCK:
                num_blocks = index
                since = self.needed(num_blocks * self.block_size).since
        return num_blocks

    def needed(self, num_computed_tokens: int) -> Needed:
        if self.reach is None:
            return Needed(0, 0)
        size = self.block_size
        first_read = self.first_read(num_computed_tokens) // size
        since = max(0, min(first_read, num_computed_tokens // size - 1))
        return Needed(self.num_sink_blocks, since)

    def takes(self, start: int, end: int) -> range:
        return range(start // self.block_size, -(-end // self.block_size))

    def max_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return it: a step reads up to reach - 1 positions before its first one, N, and writes up
        to N + max_step_tokens - 1.
        """
        all_blocks = -(-num_tokens // self.block_size)
        if self.reach is None:
            return all_blocks
        ahead = min(num_tokens, max_step_tokens) - 1
        read = -(-(self.reach - 1 + ahead) // self.block_size) + 1
        with_the_last_full = -(-ahead // self.block_size) + 2
        return min(all_blocks, self.num_sink_blocks + max(read, with_the_last_full))

    def first_taken(self, num_certain_tokens: int) -> int:  # noqa: ARG002
        return 0

    def is_published(self, index: int, num_prompt_tokens: int) -> bool:  # noqa: ARG002
        return True

    def is_writable(self, position: int) -> bool:  # noqa: ARG002
        return True


class _WindowPolicy(_NewestPositions):
    """Windows: with W positions and S sinks, position p reads p - W + 1 .. p and 0 .. S - 1."""

    def first_read(self, num_computed_tokens: int) -> int:
        assert self.reach is not None
        return num_computed_tokens - self.reach + 1


@dataclasses.dataclass(frozen=True, slots=True)
class _ChunkPolicy(_NewestPositions):
    """Chunks: position p reads those of its chunk up to p, and some in front of the chunk."""

    spec: Chunk

    def first_read(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.spec.size * self.spec.size - self.spec.before


@dataclasses.dataclass(frozen=True, slots=True)
class _StatesPolicy:
    """States: entry i is the state after (i + 1) * block_size positions.

    A step writes the last state that it completes and the checkpoints that it passes; the others
    are gaps. A written state is never changed: what is computed again has the same bytes.
    """

    is_sparse: ClassVar = True
    is_of_encoder: ClassVar = False
    frees_early: ClassVar = True
    block_size: int
    num_cached_blocks: int
    """Blocks of the prefix cache that one entry spans."""
    checkpoint_tokens: int

    def serves(self, table: Sequence[BlockId], num_blocks: int) -> int:
        step = self.num_cached_blocks
        num_blocks -= num_blocks % step
        while num_blocks and table[num_blocks - 1] == NO_BLOCK:
            num_blocks -= step
        return num_blocks

    def needed(self, num_computed_tokens: int) -> Needed:
        return Needed(0, max(0, num_computed_tokens // self.block_size - 1))

    def takes(self, start: int, end: int) -> range:
        return range(start // self.block_size, end // self.block_size)

    def first_taken(self, num_certain_tokens: int) -> int:
        return num_certain_tokens // self.block_size - 1

    def is_published(self, index: int, num_prompt_tokens: int) -> bool:
        """Return whether the entry is a checkpoint: one of many tokens, or the last of a prompt.

        An equal prompt computes its last token at least, so its last border is before that.
        """
        num_tokens = (index + 1) * self.block_size
        last = (num_prompt_tokens - 1) // self.block_size * self.block_size
        return num_tokens % self.checkpoint_tokens == 0 or num_tokens == last

    def max_held(self, num_tokens: int, max_step_tokens: int) -> int:  # noqa: ARG002
        """Return it: a step reads one state and writes two at most, but for checkpoints.

        Of a step that ends with a state, the last token may be computed again (RowResult.
        is_deferred), and then the state before is needed. A row with draft tokens takes one state
        for them.
        """
        return min(num_tokens // self.block_size, 3)

    def is_writable(self, position: int) -> bool:  # noqa: ARG002
        """Return False: a fork shares states that are complete."""
        return False


class _CrossPolicy(_NewestPositions):
    """Cross attention: all positions of the encoder's input are read, and none is written."""

    is_of_encoder: ClassVar = True

    def first_read(self, num_computed_tokens: int) -> int:  # noqa: ARG002
        return 0

    def serves(self, table: Sequence[BlockId], num_blocks: int) -> int:  # noqa: ARG002
        """Return num_blocks: these blocks are never those of the prefix cache."""
        return num_blocks

    def is_writable(self, position: int) -> bool:  # noqa: ARG002
        return False


def cache_policy(spec: CacheSpec, block_size: int, checkpoint_tokens: int = 0) -> CachePolicy:
    """Return the policy of a kind.

    block_size: Capacity.block_size. checkpoint_tokens: SchedulerSettings.state_checkpoint_tokens;
    0: there are no other checkpoints than the last states of prompts.
    """
    match spec:
        case States(every=every):
            return _StatesPolicy(every, every // block_size, checkpoint_tokens or sys.maxsize)
        case Blocks():
            return _WindowPolicy(block_size, spec.window, -(-spec.sinks // block_size))
        case Cross():
            return _CrossPolicy(block_size, None, 0)
        case Chunk():
            return _ChunkPolicy(block_size, spec.reach, 0, spec)


def longest_served(policies: Sequence[CachePolicy], tables: Sequence[Sequence[BlockId]]) -> int:
    """Return with how many of the blocks that a prefix cache has a sequence can begin.

    The tables are those of PrefixCache.match, one for each policy. The first table has no gaps.
    """
    num_blocks, num_agreed = len(tables[0]), 0
    pairs = list(zip(policies, tables, strict=True))[1:]
    for policy, table in itertools.cycle(pairs):
        if num_agreed == len(pairs):
            break
        num_served = policy.serves(table, num_blocks)
        num_agreed = num_agreed + 1 if num_served == num_blocks else 1
        num_blocks = num_served
    return num_blocks
