"""Forks, offload and windows: every live sequence reads its own KV, wherever its blocks have been.

As in test_prefix_cache the machine plays scheduler and runner, and writes into a shadow of each
block, on the device and on the host, what a model would compute there, in every cache group.
"""

import dataclasses

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.cache import Blocks, Chunk
from loraplex.core.plan import NO_BLOCK, CacheGroupCapacity
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
    block_tables: list
    num_hashed_blocks: int
    num_computed_tokens: int
    is_shared: bool = False
    """It was forked, so the bound of one sequence's blocks does not hold for its first step."""

    def kv(self, position):
        return self.salt, tuple(self.token_ids[: position + 1])


def group(
    window=None, num_sinks=0, *, spec=None, num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS
):
    return CacheGroupCapacity(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        spec=spec or Blocks(window, num_sinks),
    )


def first_read(spec, num_computed_tokens):
    """Return the first position that later ones read, sinks apart."""
    if isinstance(spec, Chunk):
        return num_computed_tokens // spec.size * spec.size - spec.before
    return num_computed_tokens - spec.window + 1


def empty_shadow(num_blocks):
    return [[None] * BLOCK_SIZE for _ in range(num_blocks)]


class KVBlocksMachine(RuleBasedStateMachine):
    groups = (group(),)

    def __init__(self):
        super().__init__()
        self.blocks = KVBlocks(BLOCK_SIZE, self.groups)
        self.live = []
        self.offloaded = []
        """Their block_tables are those of the host."""
        self.past = []
        self.now_ns = 0
        self.written = [empty_shadow(group.num_blocks) for group in self.groups]
        self.host = [empty_shadow(group.num_host_blocks) for group in self.groups]

    def draw(self, data, sequences):
        return data.draw(st.sampled_from(sequences))

    def sees(self, group, seq, position):
        """Does any position that is still to come see this one?"""
        if group.spec.reach is None or position < getattr(group.spec, "sinks", 0):
            return True
        return position >= first_read(group.spec, seq.num_computed_tokens)

    @rule(ms=st.integers(1, 4))
    def advance(self, ms):
        self.now_ns += ms * 1_000_000
        self.blocks.advance(self.now_ns)

    @rule(
        data=st.data(),
        salt=SALTS,
        retention=RETENTIONS,
        is_new=st.booleans(),
        takes_all=st.booleans(),
    )
    def admit(self, data, salt, retention, is_new, takes_all):
        token_ids = data.draw(st.lists(TOKENS, min_size=1, max_size=9))
        known = [*((seq.token_ids, seq.salt) for seq in self.live), *self.past]
        if known and not is_new:
            beginning, salt = data.draw(st.sampled_from(known))
            token_ids = beginning + token_ids
        before = self.blocks.num_available
        admission = self.blocks.admit(
            token_ids,
            salt,
            len(token_ids) if takes_all else MAX_STEP,
            max_step_tokens=MAX_STEP,
            retention=retention,
            num_prompt_tokens=len(token_ids),
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
                admission.block_tables,
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
        before = self.blocks.num_available
        grown = self.blocks.grow(seq.block_tables, end)
        if grown is None:
            assert self.blocks.num_available == before
            return
        num_tokens = (len(seq.block_tables[0]) + len(grown[0])) * BLOCK_SIZE
        most = self.blocks.max_blocks_held(num_tokens, MAX_STEP)
        for table, new, limit in zip(seq.block_tables, grown, most, strict=True):
            table += new
            held = sum(block_id != NO_BLOCK for block_id in table)
            assert seq.is_shared or held <= limit
        for position in range(first, end):
            if not self.own(seq, position):
                return
            for written, table in zip(self.written, seq.block_tables, strict=True):
                written[table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = seq.kv(position)
        seq.num_computed_tokens = end
        seq.num_hashed_blocks = self.blocks.publish(
            seq.token_ids,
            seq.salt,
            seq.block_tables,
            seq.num_hashed_blocks,
            end,
            retention=seq.retention,
            num_prompt_tokens=5,
        )
        self.blocks.release_passed(seq.block_tables, end)
        seq.is_shared = False

    def own(self, seq, position):
        """Copy on write; False if there is no block."""
        before = self.blocks.num_available
        copies = self.blocks.make_writable(seq.block_tables, position)
        if copies is None:
            assert self.blocks.num_available == before
            return False
        for copy in copies:
            written = self.written[copy.cache_group]
            written[copy.target] = list(written[copy.source])
            assert seq.block_tables[copy.cache_group][position // BLOCK_SIZE] == copy.target
        assert self.blocks.make_writable(seq.block_tables, position) == ()
        return True

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tail=st.lists(TOKENS, max_size=2))
    def fork(self, data, tail):
        """The fork goes on with other tokens; it shares the last block until one of them writes."""
        seq = self.draw(data, self.live)
        self.blocks.share(seq.block_tables)
        token_ids = seq.token_ids[: seq.num_computed_tokens] + tail
        tables = [list(table) for table in seq.block_tables]
        self.live.append(
            dataclasses.replace(seq, token_ids=token_ids, block_tables=tables, is_shared=True)
        )
        seq.is_shared = True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def offload(self, data):
        seq = self.draw(data, self.live)
        before = self.blocks.num_on_host
        offload = self.blocks.offload(seq.block_tables, seq.num_computed_tokens)
        if offload is None:
            assert self.blocks.num_on_host == before
            num_blocks = self.blocks.num_blocks_for(seq.num_computed_tokens)
            assert any(
                sum(block_id != NO_BLOCK for block_id in table[:count]) > group.host.num_free
                for group, table, count in zip(
                    self.blocks.groups, seq.block_tables, num_blocks, strict=True
                )
            )
            return
        for transfer in offload.transfers:
            source = self.written[transfer.cache_group][transfer.device_block]
            self.host[transfer.cache_group][transfer.host_block] = list(source)
        self.blocks.release(seq.block_tables)
        self.live.remove(seq)
        seq.block_tables = offload.host_tables
        self.offloaded.append(seq)

    @precondition(lambda self: self.offloaded)
    @rule(data=st.data(), reserved=st.integers(0, 1))
    def load_back(self, data, reserved):
        seq = self.draw(data, self.offloaded)
        before = self.blocks.num_available
        num_tokens = seq.num_computed_tokens
        num_tokens += min(len(seq.token_ids) - num_tokens, MAX_STEP)
        reserved = (reserved,) * len(self.groups)
        loaded = self.blocks.load_back(
            seq.token_ids,
            seq.salt,
            seq.block_tables,
            seq.num_computed_tokens,
            len(seq.token_ids) if self.blocks.frees_early else num_tokens,
            max_step_tokens=MAX_STEP,
            num_reserved_blocks=reserved,
        )
        if loaded is None:
            assert self.blocks.num_available == before
            return
        pairs = zip(self.blocks.num_available, reserved, strict=True)
        assert all(available >= kept for available, kept in pairs)
        for transfer in loaded.transfers:
            source = self.host[transfer.cache_group][transfer.host_block]
            self.written[transfer.cache_group][transfer.device_block] = list(source)
        num_blocks = self.blocks.num_blocks_for(num_tokens)
        assert tuple(len(table) for table in loaded.block_tables) == num_blocks
        self.offloaded.remove(seq)
        seq.block_tables, seq.num_hashed_blocks = loaded.block_tables, loaded.num_hashed_blocks
        seq.is_shared = True
        self.live.append(seq)

    @precondition(lambda self: self.offloaded)
    @rule(data=st.data())
    def end_on_the_host(self, data):
        seq = self.draw(data, self.offloaded)
        self.offloaded.remove(seq)
        self.blocks.free_host(seq.block_tables)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_one(self, data):
        self.finish(self.draw(data, self.live))

    def finish(self, seq):
        self.live = [other for other in self.live if other is not seq]
        self.past = [*self.past[-3:], (seq.token_ids, seq.salt)]
        self.blocks.release(seq.block_tables)

    @invariant()
    def every_sequence_sees_its_own_kv(self):
        self.blocks.check(
            [seq.block_tables for seq in self.live], [seq.block_tables for seq in self.offloaded]
        )
        places = [*((seq, self.written) for seq in self.live)]
        places += [(seq, self.host) for seq in self.offloaded]
        for seq, written in places:
            for group, shadow, table in zip(self.groups, written, seq.block_tables, strict=True):
                for position in range(seq.num_computed_tokens):
                    if self.sees(group, seq, position):
                        block_id = table[position // BLOCK_SIZE]
                        assert block_id != NO_BLOCK
                        assert shadow[block_id][position % BLOCK_SIZE] == seq.kv(position)

    @invariant()
    def passed_blocks_are_free(self):
        """Every whole block before the window is a gap, except the sinks and the last hashed."""
        for seq in self.live:
            for group, table in zip(self.groups, seq.block_tables, strict=True):
                if group.spec.reach is None or seq.is_shared:
                    continue
                first_seen = max(0, first_read(group.spec, seq.num_computed_tokens))
                end = min(first_seen // BLOCK_SIZE, seq.num_hashed_blocks - 1)
                first = -(-getattr(group.spec, "sinks", 0) // BLOCK_SIZE)
                assert all(block_id == NO_BLOCK for block_id in table[first : max(end, 0)])

    def teardown(self):
        """Check that no block is held at rest, on the device or on the host."""
        while self.live:
            self.finish(self.live[-1])
        while self.offloaded:
            self.blocks.free_host(self.offloaded.pop().block_tables)
        self.blocks.check([], [])
        assert self.blocks.num_held == 0
        assert self.blocks.num_on_host == 0


class WindowMachine(KVBlocksMachine):
    groups = (group(4),)


class WindowAndSinksMachine(KVBlocksMachine):
    groups = (group(2, 3),)


class NarrowWindowMachine(KVBlocksMachine):
    groups = (group(1),)


class FullAndWindowMachine(KVBlocksMachine):
    groups = (group(num_host_blocks=9), group(3, num_blocks=6))


class TwoWindowsMachine(KVBlocksMachine):
    groups = (group(7), group(2, 1, num_blocks=9, num_host_blocks=3))


class ThreeGroupsMachine(KVBlocksMachine):
    groups = (group(num_blocks=10), group(5, 3, num_blocks=7), group(1, num_blocks=8))


class ChunkMachine(KVBlocksMachine):
    groups = (group(spec=Chunk(4)),)


class FullAndChunkMachine(KVBlocksMachine):
    groups = (group(num_host_blocks=9), group(spec=Chunk(3, 2), num_blocks=7))


def case_of(machine):
    case = machine.TestCase
    case.settings = examples(0.6, stateful_step_count=40)
    return case


TestKVBlocks = case_of(KVBlocksMachine)
TestWindow = case_of(WindowMachine)
TestWindowAndSinks = case_of(WindowAndSinksMachine)
TestNarrowWindow = case_of(NarrowWindowMachine)
TestFullAndWindow = case_of(FullAndWindowMachine)
TestTwoWindows = case_of(TwoWindowsMachine)
TestThreeGroups = case_of(ThreeGroupsMachine)
TestChunk = case_of(ChunkMachine)
TestFullAndChunk = case_of(FullAndChunkMachine)
