"""Whatever is loaded, copied, pinned and evicted, the two tiers stay whole.

The machine plays loader and runner: it keeps the host copies that the loader would hold, and what
is written in each device page. An eviction that was not reported, or that hit something in use,
shows there.
"""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.adapter import Residency
from loraplex.core.errors import AdapterTooLargeError, ErrorInfo
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.eviction import LRUPolicy, cost_policy, lfu_policy
from loraplex.testing.fake_clock import FakeClock
from support.examples import examples

HOST_BYTES = 20
NUM_PAGES = 5
ERROR = ErrorInfo("adapter_load_failed", "the disk is on fire")
ABSENT, LOADING, HOST = Residency.ABSENT, Residency.LOADING, Residency.HOST
COPYING, DEVICE, FAILED = Residency.COPYING, Residency.DEVICE, Residency.FAILED


@dataclasses.dataclass
class Shadow:
    num_bytes: int
    num_pages: int
    residency: Residency = ABSENT
    wants: int = 0
    num_users: int = 0
    num_failures: int = 0
    retry_at_ns: int = 0
    pinned: bool = False
    idle_since_ns: int | None = None


class AdapterCacheMachine(RuleBasedStateMachine):
    keeps_host_copy = True
    new_policy = LRUPolicy

    def __init__(self):
        super().__init__()
        self.cache = AdapterCache(
            HOST_BYTES,
            NUM_PAGES,
            keeps_host_copy=self.keeps_host_copy,
            new_policy=type(self).new_policy,
        )
        self.clock = FakeClock(start_ns=5)
        self.adapters = {}
        self.num_registered = 0
        self.host_copies = set()
        """Host copies of the loader, including those being read."""
        self.page_owner = dict.fromkeys(range(NUM_PAGES))

    def among(self, *residencies):
        return [h for h, shadow in self.adapters.items() if shadow.residency in residencies]

    def draw(self, data, handles):
        return data.draw(st.sampled_from(sorted(handles)))

    def free_bytes(self):
        return HOST_BYTES - sum(self.adapters[handle].num_bytes for handle in self.host_copies)

    def pages_in_use(self):
        return sum(self.adapters[handle].num_pages for handle in self.among(COPYING, DEVICE))

    def discard(self, dropped):
        for handle in dropped:
            self.host_copies.remove(handle)

    def note_evictions(self, victims_allowed):
        """Follow the cache's evictions, which may only be among these."""
        for handle, shadow in self.adapters.items():
            now = self.cache.residency(handle)
            if now is shadow.residency:
                continue
            assert handle in victims_allowed, f"{handle}: {shadow.residency} -> {now}"
            assert now is (HOST if handle in self.host_copies else ABSENT)
            shadow.residency = now

    def droppable(self, may_evict_wanted):
        """Host copies that may leave."""
        return [
            handle
            for handle in self.host_copies
            if self.adapters[handle].residency is DEVICE
            or (
                self.adapters[handle].residency is HOST
                and (may_evict_wanted or not self.adapters[handle].wants)
            )
        ]

    def replaceable(self, may_evict_wanted):
        """Adapters that may leave the device."""
        return [
            handle
            for handle in self.among(DEVICE)
            if not self.adapters[handle].num_users
            and not self.adapters[handle].pinned
            and (may_evict_wanted or not self.adapters[handle].wants)
        ]

    def pinned_pages(self):
        return sum(shadow.num_pages for shadow in self.adapters.values() if shadow.pinned)

    @rule(num_bytes=st.integers(0, HOST_BYTES // 2), num_pages=st.integers(0, NUM_PAGES // 2 + 1))
    def register(self, num_bytes, num_pages):
        num_pages = min(num_pages, NUM_PAGES - self.pinned_pages())
        handle = self.num_registered
        self.num_registered += 1
        self.cache.register(handle, num_bytes, num_pages)
        self.adapters[handle] = Shadow(num_bytes, num_pages)

    @rule(num_bytes=st.integers(0, HOST_BYTES + 3), num_pages=st.integers(0, NUM_PAGES + 3))
    def register_too_large(self, num_bytes, num_pages):
        if num_bytes <= HOST_BYTES and num_pages <= NUM_PAGES - self.pinned_pages():
            num_pages += NUM_PAGES + 1
        with pytest.raises(AdapterTooLargeError):
            self.cache.register(-1, num_bytes, num_pages)
        assert -1 not in self.cache

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def forget(self, data):
        self.forget_one(self.draw(data, self.adapters))

    def forget_one(self, handle):
        shadow = self.adapters[handle]
        in_use = shadow.wants or shadow.num_users or shadow.residency in (LOADING, COPYING)
        dropped = self.cache.forget(handle)
        assert (dropped is None) == bool(in_use)
        if dropped is not None:
            assert set(dropped) == self.host_copies & {handle}
            self.discard(dropped)
            del self.adapters[handle]

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def want(self, data):
        handle = self.draw(data, self.adapters)
        self.cache.want((handle,))
        self.adapters[handle].wants += 1
        self.adapters[handle].idle_since_ns = None

    def wanted(self):
        return [handle for handle, shadow in self.adapters.items() if shadow.wants]

    @precondition(lambda self: self.wanted())
    @rule(data=st.data())
    def unwant(self, data):
        handle = self.draw(data, self.wanted())
        self.cache.unwant((handle,))
        self.adapters[handle].wants -= 1

    @precondition(lambda self: self.among(ABSENT, FAILED))
    @rule(data=st.data(), may_evict_wanted=st.booleans())
    def begin_load(self, data, may_evict_wanted):
        self.try_load(self.draw(data, self.among(ABSENT, FAILED)), may_evict_wanted)

    def try_load(self, handle, may_evict_wanted):
        shadow = self.adapters[handle]
        droppable = self.droppable(may_evict_wanted)
        capacity = self.free_bytes() + sum(self.adapters[other].num_bytes for other in droppable)
        paused = shadow.residency is FAILED and self.clock.now_ns() < shadow.retry_at_ns
        dropped = self.cache.begin_load(
            handle, self.clock.now_ns(), may_evict_wanted=may_evict_wanted
        )
        assert (dropped is None) == (paused or capacity < shadow.num_bytes)
        if dropped is None:
            self.note_evictions([])
            return
        assert set(dropped) <= set(droppable)
        self.discard(dropped)
        shadow.residency = LOADING
        shadow.idle_since_ns = None
        self.note_evictions(dropped)
        self.host_copies.add(handle)

    @precondition(lambda self: self.among(LOADING))
    @rule(data=st.data())
    def loaded(self, data):
        self.end_load(self.draw(data, self.among(LOADING)))

    def end_load(self, handle):
        self.cache.loaded(handle, load_ns=1 + handle % 3)
        self.adapters[handle].residency = HOST

    @precondition(lambda self: self.among(LOADING))
    @rule(data=st.data())
    def load_failed(self, data):
        handle = self.draw(data, self.among(LOADING))
        self.cache.load_failed(handle, ERROR, self.clock.now_ns())
        self.host_copies.remove(handle)
        self.fail(handle)

    def fail(self, handle):
        shadow = self.adapters[handle]
        shadow.residency = FAILED
        pause_ns = min(60, 2**shadow.num_failures) * 1_000_000_000
        shadow.num_failures += 1
        shadow.retry_at_ns = self.clock.now_ns() + pause_ns
        assert self.cache.failure(handle) == (ERROR, shadow.retry_at_ns)

    @rule(seconds=st.integers(0, 40))
    def time_passes(self, seconds):
        self.clock.advance_seconds(seconds)

    @precondition(lambda self: self.among(HOST))
    @rule(data=st.data(), may_evict_wanted=st.booleans())
    def begin_copy(self, data, may_evict_wanted):
        self.try_copy(self.draw(data, self.among(HOST)), may_evict_wanted)

    def try_copy(self, handle, may_evict_wanted):
        shadow = self.adapters[handle]
        replaceable = self.replaceable(may_evict_wanted)
        capacity = NUM_PAGES - self.pages_in_use()
        capacity += sum(self.adapters[other].num_pages for other in replaceable)
        page_ids = self.cache.begin_copy(handle, may_evict_wanted=may_evict_wanted)
        assert (page_ids is None) == (capacity < shadow.num_pages)
        if page_ids is None:
            self.note_evictions([])
            return
        shadow.residency = COPYING
        shadow.idle_since_ns = None
        self.note_evictions(replaceable)
        assert len(page_ids) == shadow.num_pages
        for page_id in page_ids:
            self.page_owner[page_id] = handle

    @precondition(lambda self: self.among(COPYING))
    @rule(data=st.data())
    def copied(self, data):
        self.end_copy(self.draw(data, self.among(COPYING)))

    def end_copy(self, handle):
        dropped = self.cache.copied(handle)
        assert dropped == (() if self.keeps_host_copy else (handle,))
        self.discard(dropped)
        self.adapters[handle].residency = DEVICE
        self.adapters[handle].num_failures = 0

    @precondition(lambda self: self.among(COPYING))
    @rule(data=st.data())
    def copy_failed(self, data):
        handle = self.draw(data, self.among(COPYING))
        dropped = self.cache.copy_failed(handle, ERROR, self.clock.now_ns())
        assert dropped == (handle,)
        self.discard(dropped)
        self.fail(handle)

    @precondition(lambda self: self.among(DEVICE))
    @rule(data=st.data())
    def acquire(self, data):
        self.pin_one(self.draw(data, self.among(DEVICE)))

    def pin_one(self, handle):
        self.cache.acquire(handle)
        self.adapters[handle].num_users += 1

    @precondition(lambda self: self.among(ABSENT, HOST))
    @rule(data=st.data(), may_evict_wanted=st.booleans(), then_pin=st.booleans())
    def bring_to_the_device(self, data, may_evict_wanted, then_pin):
        """All steps at once: random steps alone seldom fill the device."""
        handle = self.draw(data, self.among(ABSENT, HOST))
        shadow = self.adapters[handle]
        if shadow.residency is ABSENT:
            self.try_load(handle, may_evict_wanted)
        if shadow.residency is LOADING:
            self.end_load(handle)
        if shadow.residency is HOST:
            self.try_copy(handle, may_evict_wanted)
        if shadow.residency is COPYING:
            self.end_copy(handle)
        if shadow.residency is DEVICE and then_pin:
            self.pin_one(handle)

    def pinned(self):
        return [handle for handle, shadow in self.adapters.items() if shadow.num_users]

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def release(self, data):
        handle = self.draw(data, self.pinned())
        self.cache.release(handle)
        self.adapters[handle].num_users -= 1

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def pin(self, data):
        handle = self.draw(data, self.adapters)
        shadow = self.adapters[handle]
        pinned = self.pinned_pages() + (0 if shadow.pinned else shadow.num_pages)
        others = [s.num_pages for h, s in self.adapters.items() if not s.pinned and h != handle]
        if shadow.pinned or max([0, *others]) <= NUM_PAGES - pinned:
            self.cache.pin(handle)
            shadow.pinned = True
        else:
            with pytest.raises(AdapterTooLargeError, match="would be pinned"):
                self.cache.pin(handle)

    @precondition(lambda self: self.pinned_pages())
    @rule(data=st.data())
    def unpin(self, data):
        handle = self.draw(data, [h for h, shadow in self.adapters.items() if shadow.pinned])
        self.cache.unpin(handle)
        self.adapters[handle].pinned = False

    @rule(ttl_seconds=st.integers(1, 60))
    def expire(self, ttl_seconds):
        idle = [
            handle
            for handle, shadow in self.adapters.items()
            if not (shadow.wants or shadow.num_users)
            and (shadow.residency is HOST or (shadow.residency is DEVICE and not shadow.pinned))
        ]
        now_ns = self.clock.now_ns()
        due = []
        for handle in idle:
            shadow = self.adapters[handle]
            if shadow.idle_since_ns is None:
                shadow.idle_since_ns = now_ns
            elif now_ns - shadow.idle_since_ns >= ttl_seconds * 1_000_000_000:
                due.append(handle)
        assert self.cache.has_idle == bool(idle)
        dropped = self.cache.expire(now_ns, ttl_seconds * 1_000_000_000)
        assert set(dropped) == self.host_copies & set(due)
        self.discard(dropped)
        self.note_evictions(due)
        assert all(self.adapters[handle].residency is ABSENT for handle in due)

    @invariant()
    def agrees_with_loader_and_runner(self):
        self.cache.check()
        self.note_evictions([])
        stats = self.cache.stats()
        assert stats.host_bytes_used == HOST_BYTES - self.free_bytes()
        assert stats.device_pages_used == self.pages_in_use()
        assert stats.num_on_host == len(self.host_copies - set(self.among(LOADING)))
        assert stats.num_on_device == len(self.among(DEVICE))
        for handle in self.among(COPYING, DEVICE):
            page_ids = self.cache.page_ids(handle)
            assert [self.page_owner[page_id] for page_id in page_ids] == [handle] * len(page_ids)

    def teardown(self):
        """When idle everything can be evicted: no pin, page or byte has leaked."""
        for handle, shadow in self.adapters.items():
            for _ in range(shadow.num_users):
                self.cache.release(handle)
            for _ in range(shadow.wants):
                self.cache.unwant((handle,))
            self.cache.unpin(handle)
            shadow.pinned = False
            shadow.num_users = shadow.wants = 0
        for handle in self.among(LOADING):
            self.end_load(handle)
        for handle in self.among(COPYING):
            self.end_copy(handle)
        self.fill_both_tiers_with_one()
        for handle in list(self.adapters):
            self.forget_one(handle)
        self.cache.check()
        assert not self.host_copies
        stats = self.cache.stats()
        assert stats.host_bytes_used == stats.device_pages_used == 0
        assert stats.num_on_host == stats.num_on_device == 0

    def fill_both_tiers_with_one(self):
        self.cache.register(-1, HOST_BYTES, NUM_PAGES)
        self.adapters[-1] = Shadow(HOST_BYTES, NUM_PAGES, LOADING)
        dropped = self.cache.begin_load(-1, self.clock.now_ns())
        assert dropped is not None
        self.discard(dropped)
        self.note_evictions(dropped)
        self.host_copies.add(-1)
        self.end_load(-1)
        page_ids = self.cache.begin_copy(-1)
        assert sorted(page_ids) == list(range(NUM_PAGES))
        self.adapters[-1].residency = COPYING
        self.note_evictions(self.among(DEVICE))
        self.end_copy(-1)


class WithoutHostCopyMachine(AdapterCacheMachine):
    keeps_host_copy = False


class LeastFrequentlyUsedMachine(AdapterCacheMachine):
    new_policy = lfu_policy


class CheapestToReloadMachine(WithoutHostCopyMachine):
    new_policy = cost_policy


TestWithHostCopy = AdapterCacheMachine.TestCase
TestWithoutHostCopy = WithoutHostCopyMachine.TestCase
TestLeastFrequentlyUsed = LeastFrequentlyUsedMachine.TestCase
TestCheapestToReload = CheapestToReloadMachine.TestCase
for case in (TestWithHostCopy, TestWithoutHostCopy):
    case.settings = examples(1.5, stateful_step_count=50)
for case in (TestLeastFrequentlyUsed, TestCheapestToReload):
    case.settings = examples(0.75, stateful_step_count=50)
