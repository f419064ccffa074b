"""Forks, offload and windows: every live sequence reads its own KV, wherever its blocks have been.

As in test_prefix_cache the machine plays scheduler and runner, and writes into a shadow of each
block, on the device and on the host, what a model would compute there.
"""

import dataclasses

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.plan import NO_BLOCK
from loraplex.core.retention import KVRetention, TokenRangeRetention
from loraplex.memory.kv_blocks import KVBlocks
from support.examples import examples

BLOCK_SIZE = 2
NUM_BLOCKS = 8
NUM_HOST_BLOCKS = 5
MAX_STEP = 3
TOKENS = st.integers(0, 1)
SALTS = st.sampled_from([b"base", b"adapter"])
RETENTIONS = st.none() | st.builds(
    KVRetention,
    st.tuples(st.builds(TokenRangeRetention, st.integers(0, 3), st.none(), st.integers(0, 100))),
    st.integers(0, 100),
    st.none() | st.integers(0, 5),
)


@dataclasses.dataclass(eq=False)
class LiveSequence:
    token_ids: list
    salt: bytes
    retention: KVRetention | None
    block_ids: list
    num_hashed_blocks: int
    num_computed_tokens: int
    is_shared: bool = False
    """It was forked, so the bound of one sequence's blocks does not hold for its first step."""

    def kv(self, position):
        return self.salt, tuple(self.token_ids[: position + 1])


class KVBlocksMachine(RuleBasedStateMachine):
    window = None
    num_sinks = 0

    def __init__(self):
        super().__init__()
        self.blocks = KVBlocks(
            NUM_BLOCKS,
            BLOCK_SIZE,
            num_host_blocks=NUM_HOST_BLOCKS,
            attention_window=self.window,
            num_sink_tokens=self.num_sinks,
        )
        self.live = []
        self.offloaded = []
        """Their block_ids are those of the host."""
        self.past = []
        self.now_ns = 0
        self.written = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.host = [[None] * BLOCK_SIZE for _ in range(NUM_HOST_BLOCKS)]

    def draw(self, data, sequences):
        return data.draw(st.sampled_from(sequences))

    def sees(self, seq, position):
        """Does any position that is still to come see this one?"""
        if self.window is None or position < self.num_sinks:
            return True
        return position > seq.num_computed_tokens - self.window

    @rule(ms=st.integers(1, 4))
    def advance(self, ms):
        self.now_ns += ms * 1_000_000
        self.blocks.advance(self.now_ns)

    @rule(data=st.data(), salt=SALTS, retention=RETENTIONS, is_new=st.booleans())
    def admit(self, data, salt, retention, is_new):
        token_ids = data.draw(st.lists(TOKENS, min_size=1, max_size=9))
        known = [*((seq.token_ids, seq.salt) for seq in self.live), *self.past]
        if known and not is_new:
            beginning, salt = data.draw(st.sampled_from(known))
            token_ids = beginning + token_ids
        before = self.blocks.num_available
        admission = self.blocks.admit(
            token_ids, salt, MAX_STEP, retention=retention, num_prompt_tokens=len(token_ids)
        )
        if admission is None:
            assert self.blocks.num_available == before
            return
        num_cached = admission.num_cached_tokens
        self.live.append(
            LiveSequence(
                token_ids,
                salt,
                retention,
                admission.block_ids,
                num_cached // BLOCK_SIZE,
                num_cached,
            )
        )
        self.compute(self.live[-1], admission.num_new_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, MAX_STEP), new=TOKENS)
    def step(self, data, num_tokens, new):
        seq = self.draw(data, self.live)
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.token_ids = [*seq.token_ids, new]
        self.compute(seq, num_tokens)

    def compute(self, seq, num_tokens):
        """Write KV, publish, free passed blocks; no change if there are too few blocks."""
        first = seq.num_computed_tokens
        end = min(len(seq.token_ids), first + num_tokens)
        if first == end:
            return
        grown = self.blocks.grow(seq.block_ids, end)
        if grown is None:
            return
        seq.block_ids += grown
        held = sum(block_id != NO_BLOCK for block_id in seq.block_ids)
        num_tokens = len(seq.block_ids) * BLOCK_SIZE  # a table that came back may be longer
        assert seq.is_shared or held <= self.blocks.max_blocks_held(num_tokens, MAX_STEP)
        for position in range(first, end):
            if not self.own(seq, position):
                return
            block_id = seq.block_ids[position // BLOCK_SIZE]
            self.written[block_id][position % BLOCK_SIZE] = seq.kv(position)
        seq.num_computed_tokens = end
        seq.num_hashed_blocks = self.blocks.publish(
            seq.token_ids,
            seq.salt,
            seq.block_ids,
            seq.num_hashed_blocks,
            end,
            retention=seq.retention,
            num_prompt_tokens=5,
        )
        self.blocks.release_passed(seq.block_ids, end, seq.num_hashed_blocks)
        seq.is_shared = False

    def own(self, seq, position):
        """Copy on write; False if there is no block."""
        copies = self.blocks.make_writable(seq.block_ids, position)
        if copies is None:
            return False
        for copy in copies:
            self.written[copy.target] = list(self.written[copy.source])
            seq.block_ids[position // BLOCK_SIZE] = copy.target
        assert not self.blocks.is_shared(seq.block_ids[position // BLOCK_SIZE])
        return True

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tail=st.lists(TOKENS, max_size=2))
    def fork(self, data, tail):
        """The fork goes on with other tokens; it shares the last block until one of them writes."""
        seq = self.draw(data, self.live)
        self.blocks.share(seq.block_ids)
        token_ids = seq.token_ids[: seq.num_computed_tokens] + tail
        self.live.append(
            dataclasses.replace(
                seq, token_ids=token_ids, block_ids=list(seq.block_ids), is_shared=True
            )
        )
        seq.is_shared = True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def offload(self, data):
        seq = self.draw(data, self.live)
        offload = self.blocks.offload(seq.block_ids, seq.num_computed_tokens)
        free = self.blocks.num_host_free
        if offload is None:
            table = seq.block_ids[: self.blocks.num_blocks_for(seq.num_computed_tokens)]
            assert free < sum(block_id != NO_BLOCK for block_id in table)
            return
        for transfer in offload.transfers:
            self.host[transfer.host_block] = list(self.written[transfer.device_block])
        self.blocks.release(seq.block_ids)
        self.live.remove(seq)
        seq.block_ids = offload.host_block_ids
        self.offloaded.append(seq)

    @precondition(lambda self: self.offloaded)
    @rule(data=st.data(), reserved=st.integers(0, 1))
    def load_back(self, data, reserved):
        seq = self.draw(data, self.offloaded)
        before = self.blocks.num_available
        num_tokens = min(len(seq.token_ids), seq.num_computed_tokens + MAX_STEP)
        loaded = self.blocks.load_back(
            seq.token_ids,
            seq.salt,
            seq.block_ids,
            seq.num_computed_tokens,
            num_tokens,
            num_reserved_blocks=reserved,
        )
        if loaded is None:
            assert self.blocks.num_available == before
            return
        assert self.blocks.num_available >= reserved
        for transfer in loaded.transfers:
            self.written[transfer.device_block] = list(self.host[transfer.host_block])
        assert len(loaded.block_ids) == self.blocks.num_blocks_for(num_tokens)
        self.offloaded.remove(seq)
        seq.block_ids, seq.num_hashed_blocks = loaded.block_ids, loaded.num_hashed_blocks
        seq.is_shared = True
        self.live.append(seq)

    @precondition(lambda self: self.offloaded)
    @rule(data=st.data())
    def end_on_the_host(self, data):
        seq = self.draw(data, self.offloaded)
        self.offloaded.remove(seq)
        self.blocks.free_host(seq.block_ids)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_one(self, data):
        self.finish(self.draw(data, self.live))

    def finish(self, seq):
        self.live = [other for other in self.live if other is not seq]
        self.past = [*self.past[-3:], (seq.token_ids, seq.salt)]
        self.blocks.release(seq.block_ids)

    @invariant()
    def every_sequence_sees_its_own_kv(self):
        self.blocks.check(
            [seq.block_ids for seq in self.live], [seq.block_ids for seq in self.offloaded]
        )
        places = [*((seq, self.written) for seq in self.live)]
        places += [(seq, self.host) for seq in self.offloaded]
        for seq, written in places:
            for position in range(seq.num_computed_tokens):
                if self.sees(seq, position):
                    block_id = seq.block_ids[position // BLOCK_SIZE]
                    assert block_id != NO_BLOCK
                    assert written[block_id][position % BLOCK_SIZE] == seq.kv(position)

    def teardown(self):
        """Check that no block is held at rest, on the device or on the host."""
        while self.live:
            self.finish(self.live[-1])
        while self.offloaded:
            self.blocks.free_host(self.offloaded.pop().block_ids)
        self.blocks.check([], [])
        assert self.blocks.num_held == 0
        assert self.blocks.num_host_free == NUM_HOST_BLOCKS


class WindowMachine(KVBlocksMachine):
    window = 4


class WindowAndSinksMachine(KVBlocksMachine):
    window = 2
    num_sinks = 3


class NarrowWindowMachine(KVBlocksMachine):
    window = 1


PROFILE = examples(0.6, stateful_step_count=40)
TestKVBlocks = KVBlocksMachine.TestCase
TestWindow = WindowMachine.TestCase
TestWindowAndSinks = WindowAndSinksMachine.TestCase
TestNarrowWindow = NarrowWindowMachine.TestCase
for machine in (TestKVBlocks, TestWindow, TestWindowAndSinks, TestNarrowWindow):
    machine.settings = PROFILE
