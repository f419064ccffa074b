import pytest

from loraplex.memory.eviction import LRU


def test_the_least_recently_added_leaves_first():
    order = LRU()
    for handle, size in ((1, 10), (2, 20), (3, 30)):
        order.add(handle, size)
    order.remove(1)
    order.add(1, 10)
    assert order.choose(1) == [2]
    assert order.choose(20) == [2]
    assert order.choose(21) == [2, 3]
    assert order.choose(1000) == [2, 3, 1]
    assert order.choose(0) == []
    assert order.choose(-5) == []


def test_knows_its_sizes():
    order = LRU()
    order.add(1, 10)
    order.add(2, 5)
    assert (order.total_size, len(order), order.sizes()) == (15, 2, {1: 10, 2: 5})
    order.remove(1)
    assert (order.total_size, len(order), order.sizes()) == (5, 1, {2: 5})


def test_a_handle_is_in_it_once():
    order = LRU()
    order.add(1, 10)
    with pytest.raises(AssertionError, match="already"):
        order.add(1, 10)
