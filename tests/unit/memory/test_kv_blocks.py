import pytest

from loraplex.core.cache import Blocks
from loraplex.core.plan import NO_BLOCK, BlockCopy, BlockTransfer, CacheGroupCapacity
from loraplex.core.retention import KVRetention, TokenRangeRetention
from loraplex.memory.block_tables import AdmittedBlocks
from loraplex.memory.kv_blocks import KVBlocks
from support.naming import naming

SALT = b"salt"


def kv_blocks(num_blocks, block_size, *, prefix_caching=True, **group):
    """The blocks of one cache group."""
    cache_groups = (CacheGroupCapacity(num_blocks=num_blocks, **group),)
    return KVBlocks(block_size, cache_groups, prefix_caching=prefix_caching)


def run(blocks, token_ids, salt=SALT):
    """Admit, compute and publish a whole sequence; its block tables."""
    admission = blocks.admit(token_ids, salt, len(token_ids))
    num_hashed = admission.num_cached_tokens // blocks.block_size
    num_full = blocks.publish(token_ids, salt, admission.block_tables, num_hashed, len(token_ids))
    assert num_full == len(token_ids) // blocks.block_size
    return admission.block_tables


def test_admits_a_new_sequence_with_blocks_for_its_first_chunk():
    blocks = kv_blocks(8, 4)
    assert blocks.admit(list(range(10)), SALT, 100) == AdmittedBlocks([[0, 1, 2]], 0, 10)
    assert blocks.admit(list(range(10)), SALT, 5) == AdmittedBlocks([[3, 4]], 0, 5)
    assert blocks.num_held == 5


def test_serves_a_cached_beginning():
    blocks = kv_blocks(8, 4)
    tables = run(blocks, list(range(10)))
    hit = blocks.admit([*range(8), 99], SALT, 100)
    assert hit == AdmittedBlocks([[*tables[0][:2], 3]], 8, 1)
    blocks.check([tables, hit.block_tables])


def test_always_leaves_a_token_to_compute():
    blocks = kv_blocks(8, 4)
    run(blocks, list(range(8)))
    admission = blocks.admit(list(range(8)), SALT, 100)
    assert (admission.num_cached_tokens, admission.num_new_tokens) == (4, 4)


def test_serves_no_more_than_the_caller_wants():
    blocks = kv_blocks(8, 4)
    run(blocks, list(range(9)))
    assert blocks.admit(list(range(9)), SALT, 9, max_cached_tokens=0).num_cached_tokens == 0
    assert blocks.admit(list(range(9)), SALT, 9, max_cached_tokens=7).num_cached_tokens == 4


def test_refuses_without_change_what_does_not_fit():
    blocks = kv_blocks(3, 4)
    tables = run(blocks, list(range(8)))
    blocks.release(tables)
    assert (blocks.num_free, blocks.num_cached) == (1, 2)
    assert blocks.admit(list(range(8)) + [9] * 5, SALT, 5) is None
    assert blocks.admit(list(range(9)), SALT, 1, num_reserved_blocks=(1,)) is None
    assert (blocks.num_free, blocks.num_cached) == (1, 2)
    blocks.check([])
    admission = blocks.admit(list(range(9)), SALT, 1)
    assert admission == AdmittedBlocks([[*tables[0], 2]], 8, 1)


def test_taking_blocks_does_not_evict_the_hits_of_the_same_admission():
    blocks = kv_blocks(4, 4)
    old = run(blocks, list(range(4)))
    blocks.release(old)
    other = run(blocks, [7] * 8)
    blocks.release(other)
    admission = blocks.admit(list(range(4)) + [8] * 8, SALT, 8)
    (table,) = admission.block_tables
    assert table[:1] == old[0]
    assert len(set(table)) == 3


def test_grows_a_block_table_when_its_blocks_are_full():
    blocks = kv_blocks(3, 4)
    tables = blocks.admit([1, 2, 3], SALT, 3).block_tables
    assert blocks.grow(tables, 4) == ((),)
    assert blocks.grow(tables, 5) == ((1,),)
    assert blocks.grow(tables, 17) is None
    assert blocks.num_free == 1


def test_publishes_only_full_blocks_and_each_once():
    blocks = kv_blocks(4, 2)
    token_ids = [1, 2, 3, 4, 5]
    tables = blocks.admit(token_ids, SALT, 5).block_tables
    assert blocks.publish(token_ids, SALT, tables, 0, 1) == 0
    assert blocks.publish(token_ids, SALT, tables, 0, 3) == 1
    assert blocks.publish(token_ids, SALT, tables, 1, 5) == 2
    assert blocks.publish(token_ids, SALT, tables, 2, 5) == 2
    blocks.release(tables)
    assert (blocks.num_cached, blocks.num_free) == (2, 2)


def test_equal_sequences_that_run_together_leave_one_copy():
    blocks = kv_blocks(8, 2)
    token_ids = [1, 2, 3, 4, 5]
    first, second = [blocks.admit(token_ids, SALT, 5).block_tables for _ in range(2)]
    for tables in (first, second):
        blocks.publish(token_ids, SALT, tables, 0, 5)
    blocks.release(second)
    blocks.check([first])
    assert blocks.num_cached == 0
    blocks.release(first)
    assert blocks.num_cached == 2
    (table,) = blocks.admit(token_ids, SALT, 5).block_tables
    assert table[:2] == first[0][:2]


def test_a_running_copy_is_served_when_the_first_one_is_evicted():
    blocks = kv_blocks(4, 2)
    token_ids = [1, 2, 3]
    first, second = [blocks.admit(token_ids, SALT, 3).block_tables for _ in range(2)]
    for tables in (first, second):
        blocks.publish(token_ids, SALT, tables, 0, 3)
    blocks.release(first)
    filler = blocks.grow([[]], 4)
    blocks.check([second, filler])
    blocks.release(filler)
    (table,) = blocks.admit(token_ids, SALT, 1).block_tables
    assert table[:1] == second[0][:1]
    blocks.release(second)
    assert blocks.num_cached == 0


def test_the_loss_of_a_prefix_frees_what_hangs_on_it():
    blocks = kv_blocks(5, 2)
    first = blocks.admit([1, 2], SALT, 2).block_tables
    second = blocks.admit([1, 2, 3, 4], SALT, 4).block_tables
    blocks.publish([1, 2], SALT, first, 0, 2)
    blocks.publish([1, 2, 3, 4], SALT, second, 0, 4)
    blocks.release(first)
    blocks.release(second)
    assert (blocks.num_cached, blocks.num_free) == (2, 3)
    filler = blocks.grow([[]], 8)
    assert (blocks.num_cached, blocks.num_free) == (0, 1)
    blocks.check([filler])


def test_forks_share_blocks():
    blocks = kv_blocks(4, 2)
    tables = run(blocks, [1, 2, 3])
    blocks.share(tables)
    blocks.check([tables, tables])
    blocks.release(tables)
    blocks.check([tables])


def test_without_prefix_caching_released_blocks_are_free():
    blocks = kv_blocks(4, 2, prefix_caching=False)
    tables = run(blocks, [1, 2, 3])
    blocks.release(tables)
    assert (blocks.num_free, blocks.num_cached) == (4, 0)
    assert blocks.admit([1, 2, 3], SALT, 3).num_cached_tokens == 0


def test_counts_touched_blocks():
    blocks = kv_blocks(4, 16)
    assert [blocks.num_blocks_for(n) for n in (0, 1, 16, 17)] == [(0,), (1,), (1,), (2,)]
    assert blocks.num_available == (4,)


def test_a_block_too_many_released_is_our_own_error():
    blocks = kv_blocks(2, 2)
    tables = run(blocks, [1])
    blocks.release(tables)
    with pytest.raises(AssertionError, match=naming("block 0")):
        blocks.release(tables)


def test_a_shared_block_is_copied_before_it_is_written():
    blocks = kv_blocks(4, 4)
    tables = run(blocks, list(range(6)))
    blocks.share(tables)
    fork = [list(table) for table in tables]
    (copy,) = blocks.make_writable(fork, 6)
    assert copy == BlockCopy(0, tables[0][1], 2)
    assert fork[0][1] == copy.target
    blocks.check([tables, fork])
    assert blocks.make_writable(fork, 6) == ()
    assert blocks.make_writable(tables, 6) == ()


def test_a_copy_without_blocks_changes_nothing():
    blocks = kv_blocks(2, 4)
    tables = run(blocks, list(range(6)))
    blocks.share(tables)
    assert blocks.make_writable(tables, 6) is None
    blocks.check([tables, tables])


def test_what_the_prefix_cache_still_has_is_not_loaded_back():
    blocks = kv_blocks(4, 4, num_host_blocks=3)
    tokens = list(range(11))
    tables = run(blocks, tokens)
    offload = blocks.offload(tables, 10)
    assert [t.device_block for t in offload.transfers] == tables[0]
    blocks.release(tables)
    other = blocks.grow([[]], 8)
    assert blocks.num_cached == 2
    loaded = blocks.load_back(tokens, SALT, offload.host_tables, 10, 11)
    assert loaded is None, "a block is missing"
    blocks.release([other[0][:1]])
    loaded = blocks.load_back(tokens, SALT, offload.host_tables, 10, 11)
    (table,) = loaded.block_tables
    assert table[:2] == tables[0][:2]
    (transfer,) = loaded.transfers
    assert transfer == BlockTransfer(0, table[2], offload.host_tables[0][2])
    assert loaded.num_hashed_blocks == 2
    blocks.check([loaded.block_tables, [other[0][1:]]], [])


def test_an_offload_without_blocks_changes_nothing():
    blocks = kv_blocks(4, 4, num_host_blocks=2)
    tables = run(blocks, list(range(11)))
    assert blocks.offload(tables, 11) is None
    assert blocks.num_on_host == 0
    offload = blocks.offload(tables, 8)
    assert blocks.num_on_host == 2
    blocks.free_host(offload.host_tables)
    blocks.check([tables], [])


def test_blocks_of_low_priority_leave_the_cache_first():
    blocks = kv_blocks(4, 2)
    important = KVRetention((TokenRangeRetention(0, priority=100),))
    for first, retention in ((0, important), (10, None)):
        tokens = [first, first + 1, first + 2, first + 3]
        admission = blocks.admit(tokens, SALT, 4)
        blocks.publish(
            tokens, SALT, admission.block_tables, 0, 4, retention=retention, num_prompt_tokens=4
        )
        blocks.release(admission.block_tables)
    taken = blocks.grow([[]], 4)
    blocks.release(taken)
    assert blocks.admit([0, 1, 2, 3, 4], SALT, 1).num_cached_tokens == 4


def test_a_window_bounds_the_blocks_of_a_long_output():
    blocks = kv_blocks(6, 4, spec=Blocks(6, 3))
    tokens = [1, 2, 3]
    tables = blocks.admit(tokens, SALT, 3).block_tables
    (table,) = tables
    num_hashed, most = 0, 0
    while len(tokens) < 200:
        table += blocks.grow(tables, len(tokens))[0]
        held = [block_id for block_id in table if block_id != NO_BLOCK]
        most = max(most, len(held))
        num_hashed = blocks.publish(tokens, SALT, tables, num_hashed, len(tokens))
        blocks.release_passed(tables, len(tokens))
        assert table[0] != NO_BLOCK
        tokens.append(len(tokens))
    assert blocks.max_blocks_held(200, 1) == (most,) == (4,)
    blocks.check([tables])
