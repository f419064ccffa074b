"""KV blocks of several groups: a hit, a call and a loss concern all of them together."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from loraplex.core.cache import Blocks, Chunk
from loraplex.core.plan import NO_BLOCK, BlockCopy, CacheGroupCapacity
from loraplex.core.retention import KVRetention, TokenRangeRetention
from loraplex.memory.cache_policy import cache_policy, longest_served
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.memory.prefix_cache import Forgotten, PrefixCache
from support.examples import examples

SALT = b"salt"
BLOCK_SIZE = 2


def full_and_window(num_full, num_window, window=4, *, num_sinks=0, num_host=(0, 0)):
    """A group without a window, and one with it."""
    return KVBlocks(
        BLOCK_SIZE,
        (
            CacheGroupCapacity(num_blocks=num_full, num_host_blocks=num_host[0]),
            CacheGroupCapacity(
                num_blocks=num_window,
                num_host_blocks=num_host[1],
                spec=Blocks(window, num_sinks),
            ),
        ),
    )


def compute(blocks, token_ids, *, retention=None):
    """Admit a sequence chunk by chunk of one block, as the scheduler does; its block tables."""
    admission = blocks.admit(token_ids, SALT, len(token_ids), max_step_tokens=BLOCK_SIZE)
    assert admission is not None
    tables, end = admission.block_tables, admission.num_cached_tokens
    num_hashed = end // BLOCK_SIZE
    while end < len(token_ids):
        end = min(len(token_ids), end + BLOCK_SIZE)
        grown = blocks.grow(tables, end)
        assert grown is not None
        for table, new in zip(tables, grown, strict=True):
            table += new
        num_hashed = blocks.publish(
            token_ids,
            SALT,
            tables,
            num_hashed,
            end,
            retention=retention,
            num_prompt_tokens=len(token_ids),
        )
        blocks.release_passed(tables, end)
    return tables


def num_gaps(tables):
    return [table.count(NO_BLOCK) for table in tables]


def take_all(group):
    """Evict everything that a group has cached."""
    taken = group.take(group.num_available)
    group.release(taken)


def num_cached(blocks, token_ids):
    admission = blocks.admit(token_ids, SALT, 1)
    assert admission is not None
    blocks.release(admission.block_tables)
    return admission.num_cached_tokens


specs = st.builds(Blocks, st.none() | st.integers(1, 12), st.integers(0, 5)) | st.builds(
    Chunk, st.integers(1, 6), st.integers(0, 3)
)
policies = st.builds(cache_policy, specs, st.just(BLOCK_SIZE))


@st.composite
def matches(draw):
    its_policies = draw(st.lists(policies, min_size=1, max_size=3))
    num_blocks = draw(st.integers(0, 8))
    cells = st.sampled_from([0, 0, 0, NO_BLOCK])
    columns = [
        draw(st.lists(cells, min_size=num_blocks, max_size=num_blocks)) for _ in its_policies
    ]
    columns[0] = [0] * num_blocks
    return its_policies, columns


@examples(4)
@given(matches())
def test_the_longest_beginning_that_every_group_can_serve_is_found(match):
    its_policies, columns = match

    def is_whole(num_blocks):
        for policy, column in zip(its_policies, columns, strict=True):
            needed = policy.needed(num_blocks * BLOCK_SIZE)
            for index in range(num_blocks):
                if column[index] == NO_BLOCK and needed.includes(index):
                    return False
        return True

    expected = max(n for n in range(len(columns[0]) + 1) if is_whole(n))
    assert longest_served(its_policies, columns) == expected


def test_each_group_frees_what_its_own_window_has_passed():
    blocks = full_and_window(20, 4)
    tables = compute(blocks, list(range(30)))
    assert num_gaps(tables) == [0, 13]
    assert [group.pool.num_held for group in blocks.groups] == [15, 2]
    blocks.check([tables])
    assert blocks.max_blocks_held(30, 2) == (15, 3)


def test_a_hit_needs_in_a_window_group_only_what_the_window_sees():
    blocks = full_and_window(20, 20)
    tables = compute(blocks, list(range(9)))
    hit = blocks.admit([*range(9), 99], SALT, 2)
    assert hit.num_cached_tokens == 8
    assert num_gaps(hit.block_tables) == [0, 2]
    assert num_gaps(tables) == [0, 3], "the running sequence is further: block 2 is cached"
    assert [its_hits[3] for its_hits in hit.block_tables] == [table[3] for table in tables]
    blocks.check([tables, hit.block_tables])


def test_a_window_group_loses_its_blocks_alone_and_gets_them_back():
    blocks = full_and_window(30, 4)
    token_ids = list(range(9))
    blocks.release(compute(blocks, token_ids))
    take_all(blocks.groups[1])
    blocks.check([])
    assert blocks.groups[0].pool.num_cached == 4
    assert num_cached(blocks, token_ids) == 0, "the window group has nothing"
    blocks.release(compute(blocks, token_ids))
    assert blocks.groups[0].pool.num_cached == 4, "the first blocks of equal content are kept"
    assert num_cached(blocks, token_ids) == 8
    blocks.check([])


def test_the_loss_of_a_block_in_the_first_group_frees_its_successors_in_all():
    blocks = full_and_window(5, 9, window=100)
    blocks.release(compute(blocks, list(range(9))))
    assert [group.pool.num_cached for group in blocks.groups] == [4, 4]
    tables = compute(blocks, list(range(50, 53)))
    assert [group.pool.num_cached for group in blocks.groups] == [3, 3], "the tail is lost in both"
    blocks.check([tables])


def test_a_group_serves_an_equal_block_when_the_first_is_lost():
    cache = PrefixCache(2, 2)
    assert cache.insert((0, 5), None, [1, 2], SALT) == [0, 1]
    assert cache.insert((1, NO_BLOCK), None, [1, 2], SALT) == []
    assert cache.insert((2, 6), None, [1, 2], SALT) == []
    assert cache.forget(1, 5) == Forgotten(heir=6)
    assert cache.match([1, 2], SALT) == [[0], [6]]
    assert cache.forget(1, 6) == Forgotten()
    assert cache.match([1, 2], SALT) == [[0], [NO_BLOCK]]
    assert cache.insert((3, 7), None, [1, 2], SALT) == [1], "it fills the gap"
    assert cache.match([1, 2], SALT) == [[0], [7]]
    assert cache.forget(0, 0) == Forgotten(heir=1)
    cache.forget(0, 2)
    cache.forget(0, 3)
    assert cache.forget(0, 1) == Forgotten(orphans=((1, 7),))
    cache.check()


def test_sequences_that_run_together_inherit_from_each_other_in_every_group():
    blocks = full_and_window(9, 9, window=100)
    first, second = (blocks.admit([1, 2, 3, 4], SALT, 4).block_tables for _ in range(2))
    for tables in (first, second):
        blocks.publish([1, 2, 3, 4], SALT, tables, 0, 4)
    blocks.release(first)
    group = blocks.groups[1]
    taken = group.take(group.num_available)
    blocks.check()
    blocks.release(second)
    assert [group.pool.num_cached for group in blocks.groups] == [2, 2]
    group.release(taken)
    assert num_cached(blocks, [1, 2, 3, 4, 5]) == 4
    blocks.check([])


def test_a_hit_needs_the_sinks_of_a_window_group():
    blocks = full_and_window(9, 9, window=2, num_sinks=3)
    tables = compute(blocks, list(range(13)))
    assert num_gaps(tables) == [0, 3], "two blocks have sinks, and two are in the window"
    blocks.release(tables)
    group = blocks.groups[1]
    # Blocks leave in the order of their release: first those that the window passed, then the tail.
    group.release(group.take(group.pool.num_free + 5))
    assert group.pool.num_cached == 1
    assert num_cached(blocks, list(range(14))) == 2, "the first sink is there, the second is not"


@pytest.mark.parametrize(("num_full", "num_window"), [(9, 2), (2, 9)])
def test_blocks_are_taken_in_all_groups_or_in_none(num_full, num_window):
    blocks = full_and_window(num_full, num_window, window=100)
    assert blocks.admit(list(range(6)), SALT, 6) is None
    assert blocks.num_available == (num_full, num_window)
    tables = blocks.admit([1, 2], SALT, 2).block_tables
    assert blocks.grow(tables, 6) is None
    blocks.share(tables)
    filler = blocks.grow([[], []], BLOCK_SIZE)
    assert blocks.make_writable(tables, 1) is None, "one group has no block for the copy"
    blocks.check([tables, tables, [list(table) for table in filler]])


def test_every_group_copies_its_shared_block():
    blocks = full_and_window(4, 4)
    tables = blocks.admit([1, 2, 3], SALT, 3).block_tables
    blocks.share(tables)
    shared = [list(table) for table in tables]
    copies = blocks.make_writable(tables, 2)
    assert copies == tuple(BlockCopy(group, shared[group][1], 2) for group in (0, 1))
    assert tables == [[shared[0][0], 2], [shared[1][0], 2]]
    blocks.check([tables, shared])


def test_each_table_has_its_own_length():
    """One group has fewer entries of the same tokens, and takes what it lacks."""
    blocks = full_and_window(9, 9, window=100, num_host=(9, 9))
    tables = [group.take(count) for group, count in zip(blocks.groups, (3, 1), strict=True)]
    assert blocks.num_missing(tables, 6) == (0, 2)
    new = blocks.grow(tables, 5)
    assert [len(of_group) for of_group in new] == [0, 2]
    blocks.groups[1].release(new[1])
    assert blocks.grow(tables, 2) == ((), ())
    blocks.share(tables)
    assert [copy.cache_group for copy in blocks.make_writable(tables, 4)] == [0]
    assert [copy.cache_group for copy in blocks.make_writable(tables, 1)] == [0, 1]
    offload = blocks.offload(tables, 4)
    assert [len(table) for table in offload.host_tables] == [2, 1]
    blocks.groups[1].take(blocks.groups[1].num_available - 3)
    assert blocks.num_fitting(tables, 20, num_to_leave=0) == 8, "four blocks of the second group"
    assert blocks.num_fitting(tables, 20, num_to_leave=2) == 4
    assert blocks.num_fitting(tables, 3, num_to_leave=0) == 4, "what the tokens need"
    assert blocks.grow(tables, 9) is None


def test_hits_of_all_groups_are_safe_before_blocks_are_taken():
    """Taking blocks of one group frees, with a node, cached blocks of the others."""
    blocks = full_and_window(6, 6, window=100)
    blocks.release(compute(blocks, [1, 2, 3, 4, 5]))
    blocks.release(compute(blocks, [7] * 5))
    hit = blocks.admit([1, 2, 3, 4, *[9] * 8], SALT, 8)
    assert hit.num_cached_tokens == 4
    assert all(len(set(table)) == 6 for table in hit.block_tables)
    blocks.check([hit.block_tables])


def test_an_offload_takes_host_blocks_of_every_group_or_of_none():
    blocks = full_and_window(9, 9, num_host=(5, 1))
    tables = compute(blocks, list(range(9)))
    assert blocks.offload(tables, 9) is None
    assert blocks.num_on_host == 0
    blocks = full_and_window(9, 9, num_host=(5, 2))
    tables = compute(blocks, list(range(9)))
    offload = blocks.offload(tables, 9)
    assert [t.cache_group for t in offload.transfers] == [0] * 5 + [1] * 2
    blocks.release(tables)
    for group in blocks.groups:
        take_all(group)
    loaded = blocks.load_back(list(range(9)), SALT, offload.host_tables, 9, 9)
    assert num_gaps(loaded.block_tables) == [0, 3]
    assert len(loaded.transfers) == 7
    blocks.check([loaded.block_tables], [])


def test_what_one_group_has_lost_is_loaded_back_in_all_from_there_on():
    blocks = full_and_window(9, 9, window=100, num_host=(5, 5))
    token_ids = list(range(9))
    tables = compute(blocks, token_ids)
    offload = blocks.offload(tables, 9)
    blocks.release(tables)
    group = blocks.groups[1]
    group.release(group.take(group.pool.num_free + 2))  # the tail: two of its four cached blocks
    loaded = blocks.load_back(token_ids, SALT, offload.host_tables, 9, 9)
    assert loaded.num_hashed_blocks == 2
    assert [table[:2] for table in loaded.block_tables] == [table[:2] for table in tables]
    assert [t.cache_group for t in loaded.transfers] == [0] * 3 + [1] * 3
    blocks.check([loaded.block_tables], [])


def test_a_prompt_takes_blocks_by_chunks_but_fits_as_a_whole_without_a_window():
    blocks = full_and_window(8, 4)
    assert blocks.admit(list(range(18)), SALT, 18, max_step_tokens=4) is None
    admission = blocks.admit(list(range(16)), SALT, 16, max_step_tokens=4)
    assert [len(table) for table in admission.block_tables] == [2, 2]
    assert blocks.admit([9], SALT, 1, num_reserved_blocks=(0, 2)) is None
    assert blocks.admit([9], SALT, 1, num_reserved_blocks=(0, 1)) is not None


def test_a_need_that_exceeds_a_group_names_it():
    blocks = full_and_window(8, 3)
    assert blocks.shortage((8, 3)) is None
    assert blocks.shortage((9, 3)) == (
        "9 KV blocks of 2 tokens for the layers with full attention; there are 8"
    )
    assert blocks.shortage((8, 4)) == (
        "4 KV blocks of 2 tokens for the layers with a window of 4 tokens; there are 3"
    )


def test_retention_holds_in_every_group():
    blocks = full_and_window(6, 6, window=100)
    important = KVRetention((TokenRangeRetention(0, priority=100),))
    blocks.release(compute(blocks, [1, 2, 3, 4], retention=important))
    blocks.release(compute(blocks, [5, 6, 7, 8]))
    for group in reversed(blocks.groups):  # a loss in the first group would free the others, too
        group.release(group.take(group.pool.num_free + 2))
    assert num_cached(blocks, [1, 2, 3, 4, 5]) == 4
    assert num_cached(blocks, [5, 6, 7, 8, 9]) == 0
