"""Who leaves first."""

from loraplex.core.retention import BlockRetention
from loraplex.memory.cached_blocks import CachedBlocks

DEFAULT = BlockRetention()


def take_all(cached, now_ns=0):
    return [cached.pop(now_ns) for _ in range(len(cached))]


def test_the_lowest_priority_leaves_first_then_the_oldest():
    cached = CachedBlocks()
    for block_id, priority in enumerate([35, 80, 0, 35, 80, 0]):
        cached.add(block_id, BlockRetention(priority), 0)
    assert take_all(cached) == [2, 5, 0, 3, 1, 4]


def test_a_duration_that_is_over_gives_back_the_place_that_the_block_would_have_had():
    cached = CachedBlocks()
    cached.add(0, DEFAULT, 0)
    cached.add(1, BlockRetention(90, 10), 0)
    cached.add(2, BlockRetention(1, 10), 0)
    cached.add(3, DEFAULT, 0)
    assert cached.pop(9) == 2
    cached.add(2, BlockRetention(1, 10), 0)
    assert take_all(cached, 10) == [0, 1, 3, 2]


def test_a_duration_begins_anew_with_each_release():
    cached = CachedBlocks()
    cached.add(0, BlockRetention(90, 10), 0)
    cached.remove(0)
    cached.add(0, BlockRetention(90, 10), 5)
    cached.add(1, DEFAULT, 5)
    assert take_all(cached, 14) == [1, 0]


def test_what_comes_and_goes_leaves_no_trace():
    cached = CachedBlocks()
    cached.add(0, BlockRetention(0), 0)
    for _ in range(10_000):
        cached.add(1, BlockRetention(90, 10**9), 0)
        cached.remove(1)
    assert len(cached._order) < 200
    assert len(cached._expiries) < 200
    assert take_all(cached) == [0]
