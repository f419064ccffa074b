import pytest

from loraplex.core.adapter import Residency
from loraplex.core.errors import AdapterTooLargeError, ErrorInfo
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.eviction import lfu_policy
from support.naming import naming

ERROR = ErrorInfo("adapter_load_failed", "no such file")
SECOND = 1_000_000_000


def cache_with(*sizes, host_bytes=100, num_pages=4, keeps_host_copy=True):
    """Adapters 0, 1, ... of these (bytes, pages)."""
    cache = AdapterCache(host_bytes, num_pages, keeps_host_copy=keeps_host_copy)
    for handle, (num_bytes, pages) in enumerate(sizes):
        cache.register(handle, num_bytes, pages)
    return cache


def load(cache, handle, **kwargs):
    dropped = cache.begin_load(handle, 0, **kwargs)
    assert dropped is not None
    cache.loaded(handle)
    return dropped


def to_device(cache, handle, **kwargs):
    if cache.residency(handle) is Residency.ABSENT:
        load(cache, handle, **kwargs)
    page_ids = cache.begin_copy(handle, **kwargs)
    assert page_ids is not None
    cache.copied(handle)
    cache.check()
    return page_ids


def test_the_way_to_the_device():
    cache = cache_with((10, 2))
    assert 0 in cache
    assert cache.residency(0) is Residency.ABSENT
    assert cache.begin_load(0, now_ns=0) == ()
    assert cache.residency(0) is Residency.LOADING
    cache.loaded(0)
    assert cache.residency(0) is Residency.HOST
    assert cache.begin_copy(0) == (0, 1)
    assert cache.residency(0) is Residency.COPYING
    assert cache.page_ids(0) == (0, 1)
    assert cache.copied(0) == ()
    assert cache.residency(0) is Residency.DEVICE
    cache.check()


def test_what_can_never_fit_is_refused_at_once():
    cache = cache_with(host_bytes=100, num_pages=4)
    with pytest.raises(AdapterTooLargeError, match=naming(101, 100, "lora_host_bytes", "101B")):
        cache.register(0, 101, 1)
    with pytest.raises(AdapterTooLargeError, match=naming(5, 4, "lora_device_bytes")):
        cache.register(0, 100, 5)
    assert 0 not in cache
    cache.register(0, 100, 4)
    cache.check()


def test_adapters_that_never_fit_together_are_refused():
    cache = cache_with((1, 2), (1, 2), (1, 1))
    cache.require_fit([0, 1, 0])
    with pytest.raises(AdapterTooLargeError, match=naming(5, 4, "lora_device_bytes")):
        cache.require_fit([0, 1, 2])


def test_idle_adapters_are_those_without_requests():
    """An adapter that is held, and on its way or failed, is none of it."""
    cache = cache_with((10, 1), (10, 1))
    cache.pin(0)
    cache.want((1,))
    to_device(cache, 1)
    assert not cache.has_idle
    cache.unwant((1,))
    assert cache.has_idle
    cache.expire(0, SECOND)
    cache.expire(SECOND, SECOND)
    assert not cache.has_idle


def test_what_expired_and_came_back_has_its_whole_time_again():
    cache = cache_with((10, 1))
    to_device(cache, 0)
    cache.expire(0, SECOND)
    cache.expire(SECOND, SECOND)
    assert cache.residency(0) is Residency.ABSENT
    load(cache, 0)
    cache.expire(2 * SECOND, SECOND)
    assert cache.residency(0) is Residency.HOST
    to_device(cache, 0)
    cache.expire(3 * SECOND, SECOND)
    assert cache.residency(0) is Residency.DEVICE
    cache.expire(4 * SECOND, SECOND)
    assert cache.residency(0) is Residency.ABSENT


class TestHostTier:
    def test_the_least_recently_used_idle_adapter_leaves(self):
        cache = cache_with((40, 1), (40, 1), (40, 1))
        load(cache, 0)
        load(cache, 1)
        assert load(cache, 2) == (0,)
        assert cache.residency(0) is Residency.ABSENT
        assert cache.residency(1) is Residency.HOST

    def test_a_copy_of_an_adapter_on_the_device_leaves_first(self):
        cache = cache_with((40, 1), (40, 1), (40, 1))
        load(cache, 0)
        to_device(cache, 1)
        assert load(cache, 2) == (1,)
        assert cache.residency(0) is Residency.HOST
        assert cache.residency(1) is Residency.DEVICE
        cache.check()

    def test_even_if_it_is_pinned(self):
        cache = cache_with((100, 1), (100, 1))
        to_device(cache, 0)
        cache.acquire(0)
        assert load(cache, 1) == (0,)
        cache.check()

    def test_of_these_copies_the_least_recently_pinned_one(self):
        cache = cache_with((50, 1), (50, 1), (50, 1))
        to_device(cache, 0)
        to_device(cache, 1)
        cache.acquire(0)
        cache.release(0)
        assert load(cache, 2) == (1,)

    def test_what_moves_is_never_evicted(self):
        cache = cache_with((50, 1), (50, 1), (50, 1))
        cache.begin_load(0, 0)
        load(cache, 1)
        cache.begin_copy(1)
        assert cache.begin_load(2, 0, may_evict_wanted=True) is None
        assert cache.residency(0) is Residency.LOADING
        assert cache.residency(1) is Residency.COPYING
        assert cache.residency(2) is Residency.ABSENT

    def test_a_wanted_adapter_leaves_only_for_the_next_in_line(self):
        cache = cache_with((60, 1), (60, 1))
        cache.want((0,))
        load(cache, 0)
        assert cache.begin_load(1, 0) is None
        assert cache.begin_load(1, 0, may_evict_wanted=True) == (0,)

    def test_nothing_is_evicted_if_it_does_not_suffice(self):
        cache = cache_with((40, 1), (40, 1), (100, 1))
        load(cache, 0)
        cache.want((1,))
        load(cache, 1)
        assert cache.begin_load(2, 0) is None
        assert cache.residency(0) is Residency.HOST
        assert cache.stats().host_evictions == 0

    def test_no_more_leave_than_needed(self):
        cache = cache_with((30, 1), (30, 1), (30, 1), (35, 1))
        for handle in range(3):
            load(cache, handle)
        assert load(cache, 3) == (0,)


class TestDeviceTier:
    def test_the_least_recently_used_idle_adapter_leaves(self):
        cache = cache_with((10, 2), (10, 2), (10, 2))
        first = to_device(cache, 0)
        second = to_device(cache, 1)
        cache.acquire(0)
        cache.release(0)
        assert set(to_device(cache, 2)) == set(second)
        assert cache.residency(0) is Residency.DEVICE
        assert cache.page_ids(0) == first
        assert cache.residency(1) is Residency.HOST
        assert cache.page_ids(1) == ()

    def test_pinned_adapters_stay(self):
        cache = cache_with((10, 2), (10, 2), (10, 2))
        to_device(cache, 0)
        to_device(cache, 1)
        for handle in (0, 0, 1):
            cache.acquire(handle)
        cache.release(0)
        load(cache, 2)
        assert cache.begin_copy(2, may_evict_wanted=True) is None
        cache.release(0)
        assert cache.begin_copy(2) is not None
        assert cache.residency(0) is Residency.HOST

    def test_wanted_adapters_leave_after_idle_ones(self):
        cache = cache_with((10, 1), (10, 3), (10, 3), (10, 4))
        cache.want((0,))
        to_device(cache, 0)
        to_device(cache, 1)
        to_device(cache, 2)
        assert cache.residency(0) is Residency.DEVICE
        assert cache.residency(1) is Residency.HOST
        load(cache, 3)
        assert cache.begin_copy(3) is None
        cache.unwant((0,))
        assert cache.begin_copy(3) is not None

    def test_nothing_is_evicted_if_it_does_not_suffice(self):
        cache = cache_with((10, 2), (10, 2), (10, 3))
        to_device(cache, 0)
        to_device(cache, 1)
        cache.acquire(1)
        load(cache, 2)
        assert cache.begin_copy(2) is None
        assert cache.residency(0) is Residency.DEVICE
        assert cache.stats().device_evictions == 0

    def test_an_adapter_of_no_pages_needs_none(self):
        cache = cache_with((10, 0))
        load(cache, 0)
        assert cache.begin_copy(0) == ()

    def test_an_adapter_whose_host_copy_left_becomes_absent(self):
        cache = cache_with((100, 4), (100, 4))
        to_device(cache, 0)
        assert to_device(cache, 1) is not None
        assert cache.residency(0) is Residency.ABSENT

    def test_only_an_adapter_on_the_device_is_pinned(self):
        cache = cache_with((10, 1))
        load(cache, 0)
        with pytest.raises(AssertionError):
            cache.acquire(0)


class TestWithoutHostCopy:
    def test_host_bytes_are_given_back_as_the_copy_ends(self):
        cache = cache_with((10, 1), keeps_host_copy=False)
        load(cache, 0)
        cache.begin_copy(0)
        assert cache.stats().host_bytes_used == 10
        assert cache.copied(0) == (0,)
        assert cache.stats().host_bytes_used == 0
        assert cache.stats().host_evictions == 0
        cache.check()

    def test_what_leaves_the_device_is_absent(self):
        cache = cache_with((10, 4), (10, 4), keeps_host_copy=False)
        to_device(cache, 0)
        to_device(cache, 1)
        assert cache.residency(0) is Residency.ABSENT
        cache.check()


class TestFailure:
    def test_a_failed_load_gives_its_bytes_back_and_waits(self):
        cache = cache_with((100, 1), (100, 1))
        cache.begin_load(0, 0)
        cache.load_failed(0, ERROR, now_ns=5)
        assert cache.residency(0) is Residency.FAILED
        assert cache.failure(0) == (ERROR, 5 + SECOND)
        assert cache.stats().host_bytes_used == 0
        assert cache.begin_load(0, 4 + SECOND) is None
        assert cache.begin_load(0, 5 + SECOND) == ()
        assert cache.failure(0) is None
        cache.check()

    def test_the_pause_doubles_up_to_a_minute(self):
        cache = cache_with((1, 1))
        pauses, now_ns = [], 0
        for _ in range(40):
            cache.begin_load(0, now_ns)
            cache.load_failed(0, ERROR, now_ns)
            pauses.append((cache.failure(0).retry_at_ns - now_ns) // SECOND)
            now_ns = cache.failure(0).retry_at_ns
        assert pauses == [1, 2, 4, 8, 16, 32, *[60] * 34]

    def test_success_makes_the_pause_short_again(self):
        cache = cache_with((1, 4), (1, 4), keeps_host_copy=False)
        for now_ns in (0, 1 * SECOND):
            cache.begin_load(0, now_ns)
            cache.load_failed(0, ERROR, now_ns)
        cache.begin_load(0, 3 * SECOND)
        cache.loaded(0)
        to_device(cache, 0)
        to_device(cache, 1)
        cache.begin_load(0, 0)
        cache.load_failed(0, ERROR, 0)
        assert cache.failure(0).retry_at_ns == SECOND

    def test_a_failed_copy_gives_everything_back(self):
        cache = cache_with((10, 4))
        load(cache, 0)
        cache.begin_copy(0)
        assert cache.copy_failed(0, ERROR, now_ns=0) == (0,)
        assert cache.residency(0) is Residency.FAILED
        assert cache.failure(0) == (ERROR, SECOND)
        stats = cache.stats()
        assert (stats.host_bytes_used, stats.device_pages_used) == (0, 0)
        cache.check()


class TestForget:
    def test_reports_the_host_copy(self):
        cache = cache_with((10, 1), (10, 1))
        to_device(cache, 0)
        assert cache.forget(0) == (0,)
        assert cache.forget(1) == ()
        assert 0 not in cache
        assert cache.stats().device_pages_used == 0
        cache.check()

    def test_is_refused_while_it_is_in_use(self):
        cache = cache_with((10, 1))
        cache.want((0,))
        assert cache.forget(0) is None
        cache.unwant((0,))
        cache.begin_load(0, 0)
        assert cache.forget(0) is None
        cache.loaded(0)
        cache.begin_copy(0)
        assert cache.forget(0) is None
        cache.copied(0)
        cache.acquire(0)
        assert cache.forget(0) is None
        cache.release(0)
        assert cache.forget(0) == (0,)


def test_statistics():
    cache = cache_with((60, 3), (60, 3), (10, 1))
    to_device(cache, 0)
    to_device(cache, 1)
    load(cache, 2)
    cache.register(3, 10, 1)
    for handles in [(1,), (0,), (1, 2), (1, 3), (3,)]:
        cache.want(handles)
    stats = cache.stats()
    assert (stats.host_bytes_used, stats.host_bytes_total) == (70, 100)
    assert (stats.device_pages_used, stats.device_pages_total) == (3, 4)
    assert (stats.num_on_host, stats.num_on_device) == (2, 1)
    assert (stats.loads, stats.load_failures) == (3, 0)
    assert (stats.host_evictions, stats.device_evictions) == (1, 1)
    assert (stats.device_hits, stats.device_misses) == (1, 4)
    assert (stats.host_hits, stats.host_misses) == (1, 3)
    assert stats.copies == 2
    assert sum(stats.read_times.counts) == 3
    assert sum(stats.copy_times.counts) == 2


def test_the_uses_of_an_adapter_count_until_it_is_forgotten():
    cache = AdapterCache(100, 10, keeps_host_copy=True, new_policy=lfu_policy)
    for handle in range(3):
        cache.register(handle, 40, 1)
    for handle in (0, 0, 1):
        cache.want((handle,))
        cache.unwant((handle,))
    load(cache, 0)
    load(cache, 1)
    assert load(cache, 2) == (1,)
    assert cache.forget(0) == (0,)
    cache.register(0, 40, 1)
    load(cache, 0)
    cache.want((2,))
    cache.unwant((2,))
    assert load(cache, 1) == (0,)
    cache.check()
