import pytest

from loraplex.memory.eviction import EVICTION_POLICIES, LRU, cost_policy, lfu_policy


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


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_order_counts_sizes_and_chooses_until_it_suffices(name):
    order = EVICTION_POLICIES[name]().new_order()
    for handle, size in ((1, 10), (2, 20), (3, 30)):
        order.add(handle, size)
    assert (order.total_size, len(order)) == (60, 3)
    assert order.choose(0) == order.choose(-5) == []
    assert order.choose(60) == order.choose(1000) == list(order.sizes())
    assert sum(order.sizes()[handle] for handle in order.choose(25)) >= 25
    order.remove(2)
    assert (order.total_size, order.sizes()) == (40, {1: 10, 3: 30})


def test_lfu_evicts_the_least_frequently_used():
    order = lfu_policy().new_order()
    for handle, uses in ((1, 3), (2, 1), (3, 2), (4, 1)):
        order.add(handle, 1, uses)
    assert list(order.sizes()) == [2, 4, 3, 1]
    assert order.choose(3) == [2, 4, 3]


def test_old_fame_fades():
    """Adapter 1 was requested 10 times, long ago: 11 evictions later it goes before a new one."""
    order = lfu_policy().new_order()
    order.add(1, 1, 10)
    for handle in range(2, 13):
        order.add(handle, 1, 1)
        (victim,) = order.choose(1)
        order.remove(victim)
        if victim == 1:
            break
    assert victim == 1


def test_cost_keeps_what_is_dear_to_bring_back():
    order = cost_policy().new_order()
    for handle, load_ns, size in ((1, 1000, 1), (2, 1000, 10), (3, 9000, 10), (4, 10, 1)):
        order.add(handle, size, 1, load_ns)
    assert list(order.sizes()) == [4, 2, 3, 1]
