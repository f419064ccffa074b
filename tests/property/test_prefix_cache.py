"""Whatever sequences come and go, a block is only served to the content that is written in it.

The machine plays scheduler and runner: it "computes" KV by writing, for each position, the salt and
all tokens up to it into a shadow of the block. A wrong hit, a block with two owners or an eviction
that was not reported shows as foreign content under a live sequence.
"""

import dataclasses
import hashlib

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.memory.kv_blocks import KVBlocks
from loraplex.memory.prefix_cache import hash_block
from support.examples import examples

BLOCK_SIZE = 2
NUM_BLOCKS = 6
TOKENS = st.integers(0, 1)
SALTS = st.sampled_from([b"", b"base", b"adapter"])


@dataclasses.dataclass
class LiveSequence:
    token_ids: list
    salt: bytes
    block_ids: list
    num_hashed_blocks: int
    num_computed_tokens: int

    def kv(self, position):
        return self.salt, tuple(self.token_ids[: position + 1])


class KVBlocksMachine(RuleBasedStateMachine):
    hash_function = staticmethod(hash_block)
    prefix_caching = True
    finds_all = True
    """Does every published block of a live sequence have to be found?"""

    def __init__(self):
        super().__init__()
        self.blocks = KVBlocks(
            NUM_BLOCKS,
            BLOCK_SIZE,
            prefix_caching=self.prefix_caching,
            hash_function=self.hash_function,
        )
        self.live = []
        self.past = []
        """(token ids, salt) of sequences that ended: their blocks may be cached."""
        self.written = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]

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
        admission = self.blocks.admit(token_ids, salt, max_new_tokens, num_reserved_blocks=reserved)
        if admission is None:
            assert self.blocks.num_available == before
            num_needed = self.blocks.num_blocks_for(
                min(len(token_ids), len(token_ids) - 1 + max_new_tokens)
            )
            assert num_needed + reserved > before
            return
        num_cached = admission.num_cached_tokens
        assert self.blocks.num_available >= reserved
        assert num_cached % BLOCK_SIZE == 0
        assert num_cached < len(token_ids)
        assert 1 <= admission.num_new_tokens <= max_new_tokens
        assert len(set(admission.block_ids)) == len(admission.block_ids)
        num_tokens = num_cached + admission.num_new_tokens
        assert len(admission.block_ids) == self.blocks.num_blocks_for(num_tokens)
        if self.finds_all:
            assert num_cached >= at_least
        num_hashed = num_cached // BLOCK_SIZE
        self.live.append(LiveSequence(token_ids, salt, admission.block_ids, num_hashed, num_cached))

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
        grown = self.blocks.grow(seq.block_ids, num_computed)
        if grown is None:
            return False
        seq.block_ids += grown
        for position in range(seq.num_computed_tokens, num_computed):
            block_id = seq.block_ids[position // BLOCK_SIZE]
            assert not self.blocks.is_shared(block_id)
            self.written[block_id][position % BLOCK_SIZE] = seq.kv(position)
        seq.num_computed_tokens = num_computed
        seq.num_hashed_blocks = self.blocks.publish(
            seq.token_ids, seq.salt, seq.block_ids, seq.num_hashed_blocks, num_computed
        )
        assert seq.num_hashed_blocks == num_computed // BLOCK_SIZE
        return True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.draw_live(data)
        block_ids = seq.block_ids[: seq.num_hashed_blocks]
        self.blocks.share(block_ids)
        num_computed = seq.num_hashed_blocks * BLOCK_SIZE
        self.live.append(
            dataclasses.replace(seq, block_ids=block_ids, num_computed_tokens=num_computed)
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_one(self, data):
        self.finish(self.draw_live(data))

    def finish(self, seq):
        self.live = [other for other in self.live if other is not seq]
        self.past = [*self.past[-3:], (seq.token_ids, seq.salt)]
        self.blocks.release(seq.block_ids)

    @invariant()
    def every_sequence_sees_its_own_kv(self):
        self.blocks.check([seq.block_ids for seq in self.live])
        for seq in self.live:
            for position in range(seq.num_computed_tokens):
                block_id = seq.block_ids[position // BLOCK_SIZE]
                assert self.written[block_id][position % BLOCK_SIZE] == seq.kv(position)

    def teardown(self):
        """Check that no block is held at rest, and that taking all makes the cache forget all."""
        while self.live:
            self.finish(self.live[-1])
        self.blocks.check([])
        assert self.blocks.num_held == 0
        everything = self.blocks.grow([], NUM_BLOCKS * BLOCK_SIZE)
        assert everything is not None
        self.blocks.release(everything)
        self.blocks.check([])
        assert self.blocks.num_free == NUM_BLOCKS
        for token_ids, salt in self.past:
            admission = self.blocks.admit(token_ids, salt, 1)
            assert admission is not None
            assert admission.num_cached_tokens == 0
            self.blocks.release(admission.block_ids)


def weak_hash(parent_hash, kv_salt, tokens):
    """Collides all the time, as a planted collision would."""
    return bytes([hashlib.sha256(parent_hash + kv_salt + tokens).digest()[0] % 5])


class WeakHashMachine(KVBlocksMachine):
    hash_function = staticmethod(weak_hash)
    finds_all = False


class NoPrefixCacheMachine(KVBlocksMachine):
    prefix_caching = False
    finds_all = False

    @invariant()
    def nothing_is_cached(self):
        assert self.blocks.num_cached == 0


TestKVBlocks = KVBlocksMachine.TestCase
TestKVBlocks.settings = examples(2, stateful_step_count=40)
TestWeakHash = WeakHashMachine.TestCase
TestWeakHash.settings = examples(1.5, stateful_step_count=40)
TestNoPrefixCache = NoPrefixCacheMachine.TestCase
