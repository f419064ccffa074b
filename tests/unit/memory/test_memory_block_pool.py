from loraplex.memory.block_pool import BlockPool


def test_allocates_all_or_nothing():
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 2)
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [2]
    pool.check([[0, 1], [2]])


def test_a_shared_block_is_held_until_its_last_holder_leaves():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.share(table)
    pool.release(table)
    assert pool.ref_count(0) == 1
    assert pool.num_held == 1
    pool.release(table)
    assert pool.num_free == 2


def test_a_kept_block_becomes_cached_and_can_be_held_again():
    lost = []
    pool = BlockPool(2, on_lost=lost.append)
    table = pool.allocate(1)
    pool.keep(0)
    pool.release(table)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 1, 2)
    assert lost == []
    pool.share([0])
    assert (pool.num_cached, pool.num_held) == (0, 1)


def test_free_blocks_go_before_cached_ones_and_a_tail_before_its_prefix():
    lost = []
    pool = BlockPool(4, on_lost=lost.append)
    table = pool.allocate(3)
    for block_id in table:
        pool.keep(block_id)
    pool.release(table)
    assert pool.allocate(1) == [3]
    assert lost == []
    assert pool.allocate(2) == [2, 1]
    assert lost == [2, 1]


def test_the_least_recently_released_block_is_evicted_first():
    pool = BlockPool(3)
    first, second, third = (pool.allocate(1) for _ in range(3))
    for block_id in range(3):
        pool.keep(block_id)
    pool.release(second)
    pool.release(first)
    pool.release(third)
    pool.share(second)
    pool.release(second)
    assert pool.allocate(3) == [0, 2, 1]


def test_a_dropped_cached_block_is_free_at_once():
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.keep(0)
    pool.release(table)
    pool.drop(0)
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.drop(0)
    pool.check([])
