"""States as a kind of cache: which entries of a table are blocks, and where a hit ends."""

import pytest

from loraplex.core.cache import Blocks, Chunk, States
from loraplex.core.plan import NO_BLOCK, CacheGroupCapacity
from loraplex.memory.block_tables import BlockTables
from loraplex.memory.cache_policy import cache_policy
from loraplex.memory.kv_blocks import KVBlocks

SALT = b"salt"
EVERY = 4
TEXT = list(range(30))


def new_blocks(num_states: int = 8, *, first: Blocks | Chunk | None = None) -> KVBlocks:
    """Blocks of two tokens that see everything, and states every four; checkpoints every 12."""
    return KVBlocks(
        2,
        (
            CacheGroupCapacity(spec=first or Blocks(), num_blocks=32, num_host_blocks=32),
            CacheGroupCapacity(spec=States(EVERY), num_blocks=num_states, num_host_blocks=2),
        ),
        state_checkpoint_tokens=12,
    )


def empty() -> BlockTables:
    return [[], []]


def grow(blocks: KVBlocks, tables: BlockTables, num_tokens: int, **options: int) -> None:
    new = blocks.grow(tables, num_tokens, **options)
    assert new is not None
    for table, block_ids in zip(tables, new, strict=True):
        table += block_ids


def compute(blocks: KVBlocks, end: int, num_prompt_tokens: int) -> BlockTables:
    """Compute a text in one step; return its tables after it."""
    tables = empty()
    grow(blocks, tables, end, num_certain_tokens=end)
    blocks.publish(TEXT, SALT, tables, 0, end, num_prompt_tokens=num_prompt_tokens)
    blocks.release_passed(tables, end)
    return tables


def is_block(table: list[int]) -> list[bool]:
    return [block_id != NO_BLOCK for block_id in table]


def test_a_step_takes_its_last_state_and_the_checkpoints() -> None:
    blocks, tables = new_blocks(), empty()
    grow(blocks, tables, 26, num_certain_tokens=26)
    assert is_block(tables[1]) == [False, False, True, False, False, True]
    assert blocks.groups[1].num_available == 6


def test_no_checkpoint_is_taken_from_the_blocks_that_others_need() -> None:
    blocks, tables = new_blocks(), empty()
    grow(blocks, tables, 26, num_certain_tokens=26, num_to_leave=7)
    assert is_block(tables[1]) == [False] * 5 + [True]


def test_a_step_whose_last_token_may_be_computed_again_takes_two_states() -> None:
    blocks, tables = new_blocks(), empty()
    grow(blocks, tables, 24, num_certain_tokens=23, num_to_leave=8)
    assert is_block(tables[1]) == [False] * 4 + [True, True]
    assert blocks.num_missing([], 24, 23)[1] == 2
    assert blocks.num_missing([], 24, 24)[1] == 1


def test_draft_tokens_take_one_state() -> None:
    blocks, tables = new_blocks(), empty()
    grow(blocks, tables, 7, num_certain_tokens=7)
    assert blocks.num_fitting(tables, 17, num_to_leave=0) == 11
    grow(blocks, tables, 11, num_certain_tokens=6)
    assert is_block(tables[1]) == [True, True]


@pytest.mark.parametrize("num_more", [0, 1, 8])
def test_a_first_step_that_is_shorter_than_admitted_has_the_state_it_ends_with(
    num_more: int,
) -> None:
    blocks = new_blocks()
    admission = blocks.admit(TEXT, SALT, 30, max_step_tokens=29)
    assert admission is not None
    tables = admission.block_tables
    assert is_block(tables[1]) == [False] * 6 + [True]
    end = 12 + num_more
    blocks.fit(tables, 0, end, end, blocks.groups[1].num_available)
    assert len(tables[1]) == end // EVERY
    assert is_block(tables[1])[-1]
    assert blocks.groups[1].num_available == 7
    blocks.check([tables])


def test_a_hit_ends_at_a_checkpoint() -> None:
    blocks = new_blocks()
    tables = compute(blocks, 23, num_prompt_tokens=30)
    assert is_block(tables[1]) == [False] * 4 + [True], "one state is needed"
    for length, expected in ((23, 12), (13, 12), (12, 0)):
        admission = blocks.admit(TEXT[:length], SALT, 1)
        assert admission is not None
        assert admission.num_cached_tokens == expected
        blocks.release(admission.block_tables)
    blocks.release(tables)
    blocks.check([])
    assert blocks.groups[1].pool.num_cached == 1, "the last state is no checkpoint"


def test_the_last_border_of_a_prompt_is_a_checkpoint() -> None:
    blocks = new_blocks()
    compute(blocks, 21, num_prompt_tokens=21)
    admission = blocks.admit(TEXT[:21], SALT, 1)
    assert admission is not None
    assert admission.num_cached_tokens == 20


def test_a_hit_ends_earlier_where_the_state_was_evicted() -> None:
    blocks = new_blocks(num_states=3)
    blocks.release(compute(blocks, 21, num_prompt_tokens=21))
    states = blocks.groups[1]
    states.release(states.take(2))
    admission = blocks.admit(TEXT[:21], SALT, 1)
    assert admission is not None
    assert admission.num_cached_tokens == 20, "checkpoints leave in the order of their release"
    blocks.release(admission.block_tables)
    states.release(states.take(3))
    admission = blocks.admit(TEXT[:21], SALT, 1)
    assert admission is not None
    assert admission.num_cached_tokens == 0


def test_the_last_full_state_goes_to_the_host_and_back() -> None:
    blocks = new_blocks()
    tables = compute(blocks, 18, num_prompt_tokens=30)
    offload = blocks.offload(tables, 18)
    assert offload is not None
    assert is_block(offload.host_tables[1]) == [False] * 3 + [True]
    blocks.release(tables)
    loaded = blocks.load_back(TEXT, SALT, offload.host_tables, 18, 30, max_step_tokens=6)
    assert loaded is not None
    assert [t.cache_group for t in loaded.transfers].count(1) == 1
    assert is_block(loaded.block_tables[1]) == [False] * 3 + [True, False, True]
    blocks.check([loaded.block_tables], [])


def test_a_fork_copies_no_state() -> None:
    blocks = new_blocks()
    tables = compute(blocks, 9, num_prompt_tokens=9)
    blocks.share(tables)
    copies = blocks.make_writable(tables, 9)
    assert copies is not None
    assert [copy.cache_group for copy in copies] == [0]


@pytest.mark.parametrize("first", [Chunk(EVERY), States(EVERY)])
def test_without_blocks_of_all_positions_there_is_no_prefix_cache(first: Chunk | States) -> None:
    blocks = KVBlocks(2, (CacheGroupCapacity(spec=first, num_blocks=16),))
    assert not blocks.prefix_caching
    tables = [[*(blocks.grow([[]], 20) or ())[0]]]
    assert blocks.publish(TEXT, SALT, tables, 0, 20) == 10
    blocks.release(tables)
    assert blocks.num_cached == 0


def test_a_sequence_holds_three_states_at_most() -> None:
    policy = cache_policy(States(EVERY), 2)
    assert [policy.max_held(n, 8) for n in (3, 4, 11, 100)] == [0, 1, 2, 3]


def test_the_error_names_the_states() -> None:
    shortage = new_blocks().shortage((1, 9))
    assert shortage == (
        "9 KV blocks of 4 tokens for the layers with a state every 4 tokens; there are 8"
    )
