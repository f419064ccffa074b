"""Any legal use of the block pool agrees with a plain model of it, and nothing leaks."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.retention import DEFAULT_PRIORITY, BlockRetention
from loraplex.memory.block_pool import BlockPool

NUM_BLOCKS = 6
RETENTIONS = st.builds(BlockRetention, st.integers(33, 37), st.none() | st.integers(0, 3))


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: block tables, the kept blocks, the cached ones in the order of their release,
    and until when each of them has another priority than the default one.
    """

    def __init__(self):
        super().__init__()
        self.lost = []
        self.pool = BlockPool(NUM_BLOCKS, on_lost=self.lost.append)
        self.tables = []
        self.kept = set()
        self.cached = []
        self.retentions = {}
        self.ends = {}
        self.now_ns = 0

    def in_order_of_eviction(self):
        def priority(block_id):
            is_over = self.ends.get(block_id) is not None and self.ends[block_id] <= self.now_ns
            default = BlockRetention()
            return DEFAULT_PRIORITY if is_over else self.retentions.get(block_id, default).priority

        return sorted(self.cached, key=priority)

    def held(self):
        return sorted({block_id for table in self.tables for block_id in table})

    def free(self):
        return set(range(NUM_BLOCKS)) - set(self.held()) - set(self.cached)

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, n):
        free, held = self.free(), self.held()
        num_evicted = n - len(free)
        taken = self.pool.allocate(n)
        assert (taken is None) == (n > len(free) + len(self.cached))
        if taken is None:
            assert not self.lost
            return
        assert len(set(taken)) == n
        assert not set(taken) & set(held)
        evicted = self.in_order_of_eviction()[: max(0, num_evicted)]
        assert set(taken) - free == set(evicted)
        assert self.lost == evicted
        self.lost.clear()
        self.cached = [block_id for block_id in self.cached if block_id not in evicted]
        self.kept -= set(evicted)
        self.forget(evicted)
        self.tables.append(taken)

    def forget(self, block_ids):
        for block_id in block_ids:
            self.retentions.pop(block_id, None)

    @rule(ns=st.integers(1, 2))
    def advance(self, ns):
        self.now_ns += ns
        self.pool.advance(self.now_ns)

    @precondition(lambda self: self.tables and self.held())
    @rule(data=st.data(), retention=RETENTIONS)
    def retain(self, data, retention):
        block_id = data.draw(st.sampled_from(self.held()))
        self.pool.retain(block_id, retention)
        self.retentions[block_id] = retention

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_table(self, data):
        table = list(data.draw(st.sampled_from(self.tables)))
        self.pool.share(table)
        self.tables.append(table)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share_cached_blocks(self, data):
        hits = data.draw(st.lists(st.sampled_from(self.cached), min_size=1, unique=True))
        self.pool.share(hits)
        self.cached = [block_id for block_id in self.cached if block_id not in hits]
        self.tables.append(hits)

    @precondition(lambda self: set(self.held()) - self.kept)
    @rule(data=st.data())
    def keep(self, data):
        block_id = data.draw(st.sampled_from(sorted(set(self.held()) - self.kept)))
        self.pool.keep(block_id)
        self.kept.add(block_id)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.drop(block_id)
        self.kept.remove(block_id)
        if block_id in self.cached:
            self.forget([block_id])
        self.cached = [other for other in self.cached if other != block_id]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.release_table(table)

    def release_table(self, table):
        self.pool.release(table)
        gone = [block_id for block_id in reversed(table) if block_id not in self.held()]
        self.cached += [block_id for block_id in gone if block_id in self.kept]
        for block_id in gone:
            duration_ns = self.retentions.get(block_id, BlockRetention()).duration_ns
            self.ends[block_id] = None if duration_ns is None else self.now_ns + duration_ns
        self.forget(set(gone) - self.kept)
        assert self.lost == [block_id for block_id in gone if block_id not in self.kept]
        self.lost.clear()

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check(self.tables)
        counts = Counter(block_id for table in self.tables for block_id in table)
        for block_id in range(NUM_BLOCKS):
            assert self.pool.ref_count(block_id) == counts[block_id]
            assert (block_id in self.pool.kept) == (block_id in self.kept)
        assert self.pool.num_held == len(counts)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == len(self.free())

    def teardown(self):
        """Check that no block is held at rest, and that every block can be taken."""
        while self.tables:
            self.release_table(self.tables.pop())
        self.pool.check([])
        assert self.pool.num_held == 0
        everything = self.pool.allocate(NUM_BLOCKS)
        assert everything is not None
        assert sorted(everything) == list(range(NUM_BLOCKS))
        assert self.lost == self.in_order_of_eviction()


TestBlockPool = BlockPoolMachine.TestCase
