"""Pinned adapters, adapters that expire, and the activity of adapters."""

import pytest

from loraplex.core.errors import AdapterNotFoundError, AdapterTooLargeError
from loraplex.core.scheduler_settings import SchedulerSettings
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.naming import naming

TTL_NS = 1000 * MILLISECOND_NS


def on_device(fake):
    residency = fake.engine.adapter_activity().residency
    return {digest for digest, where in residency.items() if where == "device"}


def test_what_would_leave_the_device_is_what_leaves_it():
    fake = FakeEngine()
    for digest in "abcd":
        fake.register(digest, num_pages=5)
    for digest in "cab":
        fake.add([1], digest)
        fake.run()
    fake.engine.pin_adapter("a")
    activity = fake.engine.adapter_activity()
    assert activity.leaving == {"c": 5, "b": 5}, "in the order of their last use, not pinned ones"
    assert [activity.evicted_for(num_pages) for num_pages in (0, 1, 5, 6)] == [
        [],
        ["c"],
        ["c"],
        ["c", "b"],
    ]
    fake.add([1], "d")
    fake.run()
    assert on_device(fake) == {"a", "b", "d"}


class TestHeld:
    def test_it_comes_to_the_device_and_stays(self):
        fake = FakeEngine()
        for digest in "abcd":
            fake.register(digest, num_pages=6)
        fake.engine.pin_adapter("a")
        fake.step()
        fake.run()
        assert on_device(fake) == {"a"}
        for digest in "bcdbcd":
            fake.add([1], digest)
            fake.run()
            assert "a" in on_device(fake)
        activity = fake.engine.adapter_activity()
        assert activity.pinned == ("a",)
        assert fake.engine.stats().adapters.num_held == 1

    def test_released_it_leaves_like_any_other(self):
        fake = FakeEngine()
        for digest in "abc":
            fake.register(digest, num_pages=6)
        fake.engine.pin_adapter("a")
        fake.run()
        fake.engine.unpin_adapter("a")
        fake.engine.unpin_adapter("never known")
        for digest in "bc":
            fake.add([1], digest)
            fake.run()
        assert on_device(fake) == {"b", "c"}

    def test_a_load_that_failed_is_tried_again(self):
        fake = FakeEngine()
        for digest in "ab":
            fake.register(digest)
        fake.loader.fail("a")
        fake.engine.pin_adapter("a")
        fake.step()
        fake.run()
        assert on_device(fake) == set()
        fake.clock.advance(2000 * MILLISECOND_NS)
        fake.add([1], "b")
        fake.run()
        assert on_device(fake) == {"a", "b"}

    def test_a_pin_that_leaves_no_pages_for_others_is_refused(self):
        fake = FakeEngine()
        fake.register("a", num_pages=6)
        fake.register("big", num_pages=11)
        with pytest.raises(AdapterTooLargeError, match=naming(6, 16)):
            fake.engine.pin_adapter("a")
        with pytest.raises(AdapterNotFoundError):
            fake.engine.pin_adapter("never known")
        fake.run()
        assert on_device(fake) == set()


class TestTtl:
    def test_idle_adapters_leave_both_tiers(self):
        fake = FakeEngine(settings=SchedulerSettings(lora_ttl_seconds=TTL_NS / 1e9))
        for digest in "ab":
            fake.register(digest)
            fake.add([1], digest)
        fake.engine.pin_adapter("a")
        fake.run()
        assert on_device(fake) == {"a", "b"}
        assert fake.engine.is_idle
        fake.step()
        while (wake_ns := fake.engine.next_expiry_ns()) is not None:
            assert wake_ns - fake.clock.now_ns() <= TTL_NS // 2
            fake.clock.advance(max(0, wake_ns - fake.clock.now_ns()))
            fake.step()
        assert on_device(fake) == {"a"}
        assert list(fake.loader.host) == [1]
        fake.engine.check()
        request_id = fake.add([1], "b")
        fake.run()
        assert fake.tokens(request_id) == fake.alone(request_id)

    def test_what_is_used_stays(self):
        fake = FakeEngine(settings=SchedulerSettings(lora_ttl_seconds=TTL_NS / 1e9))
        fake.register("a")
        for _ in range(10):
            fake.add([1], "a", max_tokens=2)
            fake.run()
            fake.clock.advance(TTL_NS // 2)
            fake.step()
        assert fake.engine.stats().adapters.loads == 1

    def test_without_it_nothing_wakes_an_idle_engine(self):
        fake = FakeEngine()
        fake.register("a")
        fake.add([1], "a")
        fake.run()
        assert fake.engine.next_expiry_ns() is None


def test_running_and_waiting_counts():
    fake = FakeEngine()
    for digest in "ab":
        fake.register(digest)
    fake.add([1], "a", max_tokens=20)
    fake.add([2], "a", max_tokens=20)
    fake.step(3)
    fake.loader.num_polls = 5
    fake.add([3], "b", max_tokens=20)
    fake.step()
    activity = fake.engine.adapter_activity()
    assert activity.running == {"a": 2}
    assert activity.waiting == {"b": 1}
    fake.run()
    activity = fake.engine.adapter_activity()
    assert (activity.running, activity.waiting) == ({}, {})


def test_the_eviction_policy_is_the_operators():
    """a was used thrice, b once and last: by frequency b leaves."""
    fake = FakeEngine(eviction_policy="lfu")
    for digest in "abc":
        fake.register(digest, num_pages=8)
    for digest in "aaabc":
        fake.add([1], digest)
        fake.run()
    assert on_device(fake) == {"a", "c"}


def test_load_times_are_counted():
    fake = FakeEngine()
    fake.register("a")
    fake.add([1], "a")
    fake.run()
    tiers = fake.engine.stats().adapters
    assert sum(tiers.read_times.counts) == sum(tiers.copy_times.counts) == 1
    assert (tiers.copies, tiers.host_misses, tiers.host_hits) == (1, 1, 0)


def test_what_is_to_be_forgotten_is_pinned_no_longer():
    fake = FakeEngine()
    fake.register("a")
    fake.add([1], "a", max_tokens=20)
    fake.engine.pin_adapter("a")
    fake.step(4)
    fake.engine.forget_adapter("a")
    assert fake.engine.adapter_activity().pinned == ()
    fake.run()
    assert fake.engine.adapter_activity().residency == {}
