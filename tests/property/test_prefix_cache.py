"""Whatever sequences come and go, a block is only served to the content that is written in it.

The machine plays scheduler and runner: it "computes" KV by writing, for each position, the salt and
all tokens up to it into a shadow of the block. A wrong hit, a block with two owners or an eviction
that was not reported shows as foreign content under a live sequence.
"""

import dataclasses

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.plan import CacheGroupCapacity
from loraplex.memory.kv_blocks import KVBlocks
from support.examples import examples

BLOCK_SIZE = 2
NUM_BLOCKS = 6
TOKENS = st.integers(0, 1)
SALTS = st.sampled_from([b"", b"base", b"adapter"])


@dataclasses.dataclass
class LiveSequence:
    token_ids: list
    salt: bytes
    block_tables: list
    num_hashed_blocks: int
    num_computed_tokens: int

    def kv(self, position):
        return self.salt, tuple(self.token_ids[: position + 1])


class KVBlocksMachine(RuleBasedStateMachine):
    prefix_caching = True
    finds_all = True
    """Does every published block of a live sequence have to be found?"""
    num_blocks = (NUM_BLOCKS,)
    """Size of each cache group."""

    def __init__(self):
        super().__init__()
        self.blocks = KVBlocks(
            BLOCK_SIZE,
            [CacheGroupCapacity(num_blocks=num_blocks) for num_blocks in self.num_blocks],
            prefix_caching=self.prefix_caching,
        )
        self.live = []
        self.past = []
        """(token ids, salt) of sequences that ended: their blocks may be cached."""
        self.written = [[[None] * BLOCK_SIZE for _ in range(size)] for size in self.num_blocks]

    def draw_live(self, data):
        return data.draw(st.sampled_from(self.live))

    def num_to_be_found(self, token_ids, salt, limit):
        """Leading tokens that a live sequence has published in full blocks."""
        best = 0
        for seq in self.live:
            num_tokens = 0
            for end in range(BLOCK_SIZE, seq.num_hashed_blocks * BLOCK_SIZE + 1, BLOCK_SIZE):
                if end <= limit and seq.token_ids[:end] == token_ids[:end] and seq.salt == salt:
                    num_tokens = end
            best = max(best, num_tokens)
        return best

    def admit(self, token_ids, salt, max_new_tokens, reserved=0):
        at_least = self.num_to_be_found(token_ids, salt, len(token_ids) - 1)
        before = self.blocks.num_available
        kept = (reserved,) * len(self.num_blocks)
        admission = self.blocks.admit(token_ids, salt, max_new_tokens, num_reserved_blocks=kept)
        if admission is None:
            assert self.blocks.num_available == before
            num_needed = self.blocks.num_blocks_for(
                min(len(token_ids), len(token_ids) - 1 + max_new_tokens)
            )
            pairs = zip(num_needed, before, strict=True)
            assert any(needed + reserved > available for needed, available in pairs)
            return
        num_cached = admission.num_cached_tokens
        assert min(self.blocks.num_available) >= reserved
        assert num_cached % BLOCK_SIZE == 0
        assert num_cached < len(token_ids)
        assert 1 <= admission.num_new_tokens <= max_new_tokens
        assert all(len(set(table)) == len(table) for table in admission.block_tables)
        num_tokens = num_cached + admission.num_new_tokens
        num_blocks = self.blocks.num_blocks_for(num_tokens)
        assert tuple(len(table) for table in admission.block_tables) == num_blocks
        if self.finds_all:
            assert num_cached >= at_least
        num_hashed = num_cached // BLOCK_SIZE
        tables = admission.block_tables
        self.live.append(LiveSequence(token_ids, salt, tables, num_hashed, num_cached))

    @rule(
        token_ids=st.lists(TOKENS, min_size=1, max_size=9),
        salt=SALTS,
        max_new_tokens=st.integers(1, 9),
        reserved=st.integers(0, 2),
    )
    def admit_new(self, token_ids, salt, max_new_tokens, reserved):
        self.admit(token_ids, salt, max_new_tokens, reserved)

    @precondition(lambda self: self.live or self.past)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=3), other_salt=st.booleans())
    def admit_with_a_known_beginning(self, data, more, other_salt):
        known = [*((seq.token_ids, seq.salt) for seq in self.live), *self.past]
        token_ids, salt = data.draw(st.sampled_from(known))
        if other_salt:
            salt = data.draw(SALTS)
        self.admit(token_ids + more, salt, max_new_tokens=len(token_ids) + 3)

    @rule(token_ids=st.lists(TOKENS, min_size=3, max_size=5), salt=SALTS, end_first=st.booleans())
    def run_twins(self, token_ids, salt, end_first):
        """Equal sequences admitted together compute equal blocks; one goes on alone."""
        before = len(self.live)
        self.admit(token_ids, salt, max_new_tokens=9)
        self.admit(token_ids, salt, max_new_tokens=9)
        twins = self.live[before:]
        for seq in twins:
            self.compute(seq, len(token_ids))
        if len(twins) == 2:
            self.finish(twins[0 if end_first else 1])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 4), new=st.lists(TOKENS, max_size=2))
    def step(self, data, num_tokens, new):
        """Compute some tokens and append what was sampled; give up if there are too few blocks."""
        seq = self.draw_live(data)
        if not self.compute(seq, seq.num_computed_tokens + num_tokens):
            self.finish(seq)
        elif seq.num_computed_tokens == len(seq.token_ids):
            seq.token_ids = seq.token_ids + new

    def compute(self, seq, until):
        """Write KV and make the full blocks known; False if there are too few."""
        num_computed = min(len(seq.token_ids), until)
        grown = self.blocks.grow(seq.block_tables, num_computed)
        if grown is None:
            return False
        for table, new in zip(seq.block_tables, grown, strict=True):
            table += new
        for position in range(seq.num_computed_tokens, num_computed):
            assert self.blocks.make_writable(seq.block_tables, position) == ()
            for written, table in zip(self.written, seq.block_tables, strict=True):
                written[table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = seq.kv(position)
        seq.num_computed_tokens = num_computed
        seq.num_hashed_blocks = self.blocks.publish(
            seq.token_ids, seq.salt, seq.block_tables, seq.num_hashed_blocks, num_computed
        )
        assert seq.num_hashed_blocks == num_computed // BLOCK_SIZE
        return True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.draw_live(data)
        tables = [table[: seq.num_hashed_blocks] for table in seq.block_tables]
        self.blocks.share(tables)
        num_computed = seq.num_hashed_blocks * BLOCK_SIZE
        self.live.append(
            dataclasses.replace(seq, block_tables=tables, num_computed_tokens=num_computed)
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_one(self, data):
        self.finish(self.draw_live(data))

    def finish(self, seq):
        self.live = [other for other in self.live if other is not seq]
        self.past = [*self.past[-3:], (seq.token_ids, seq.salt)]
        self.blocks.release(seq.block_tables)

    @invariant()
    def every_sequence_sees_its_own_kv(self):
        self.blocks.check([seq.block_tables for seq in self.live])
        for seq in self.live:
            for position in range(seq.num_computed_tokens):
                for written, table in zip(self.written, seq.block_tables, strict=True):
                    block_id = table[position // BLOCK_SIZE]
                    assert written[block_id][position % BLOCK_SIZE] == seq.kv(position)

    def teardown(self):
        """Check that no block is held at rest, and that taking all makes the cache forget all."""
        while self.live:
            self.finish(self.live[-1])
        self.blocks.check([])
        assert self.blocks.num_held == 0
        for group in self.blocks.groups:
            group.release(group.take(group.num_blocks))
            self.blocks.check([])
        assert self.blocks.num_free == sum(self.num_blocks)
        for token_ids, salt in self.past:
            admission = self.blocks.admit(token_ids, salt, 1)
            assert admission is not None
            assert admission.num_cached_tokens == 0
            self.blocks.release(admission.block_tables)


class NoPrefixCacheMachine(KVBlocksMachine):
    prefix_caching = False
    finds_all = False

    @invariant()
    def nothing_is_cached(self):
        assert self.blocks.num_cached == 0


class UnequalGroupsMachine(KVBlocksMachine):
    """Every group without a window needs every block; one group has the fewest."""

    num_blocks = (NUM_BLOCKS + 2, NUM_BLOCKS)


class SmallFirstGroupMachine(KVBlocksMachine):
    num_blocks = (NUM_BLOCKS, NUM_BLOCKS + 3, NUM_BLOCKS + 1)


TestKVBlocks = KVBlocksMachine.TestCase
TestKVBlocks.settings = examples(2, stateful_step_count=40)
TestNoPrefixCache = NoPrefixCacheMachine.TestCase
TestUnequalGroups = UnequalGroupsMachine.TestCase
TestUnequalGroups.settings = examples(0.8, stateful_step_count=40)
TestSmallFirstGroup = SmallFirstGroupMachine.TestCase
TestSmallFirstGroup.settings = examples(0.8, stateful_step_count=40)
