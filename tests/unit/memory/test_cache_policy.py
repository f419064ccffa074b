"""What a policy keeps, compared with what later positions read by definition."""

import hypothesis.strategies as st
from hypothesis import given

from loraplex.core.cache import Blocks, CacheSpec, Chunk, States
from loraplex.memory.cache_policy import cache_policy
from support.examples import examples

specs = st.builds(Blocks, st.none() | st.integers(1, 12), st.integers(0, 5)) | st.builds(
    Chunk, st.integers(1, 12), st.integers(0, 3)
)
MAX_TOKENS = 30


def reads(spec: CacheSpec, position: int) -> set[int]:
    """Return the earlier positions that the computation of a position reads."""
    if isinstance(spec, Chunk):
        return set(range(max(0, position // spec.size * spec.size - spec.before), position))
    window = position + 1 if spec.window is None else spec.window
    return {p for p in range(position) if p > position - window or p < spec.sinks}


def needed_blocks(spec: CacheSpec, block_size: int, num_computed: int) -> set[int]:
    """Return the blocks of computed positions that any later one reads, and the last full one."""
    blocks = {
        p // block_size
        for position in range(num_computed, num_computed + MAX_TOKENS)
        for p in reads(spec, position)
        if p < num_computed
    }
    last_full = num_computed // block_size - 1
    return blocks | ({last_full} if last_full >= 0 else set())


@examples(4)
@given(specs, st.integers(1, 4), st.integers(0, MAX_TOKENS))
def test_what_is_needed_is_what_later_positions_read(
    spec: CacheSpec, block_size: int, num_computed: int
) -> None:
    policy = cache_policy(spec, block_size)
    needed, num_blocks = policy.needed(num_computed), len(policy.takes(0, num_computed))
    kept = {index for index in range(num_blocks) if needed.includes(index)}
    # Later positions are written to the last block, if it is not full.
    not_full = {num_computed // block_size} & set(range(num_blocks))
    assert kept == needed_blocks(spec, block_size, num_computed) | not_full
    assert policy.frees_early == (policy.needed(10**6).since > 0)


@examples(4)
@given(specs, st.integers(1, 4), st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_no_sequence_holds_more_than_the_maximum(
    spec: CacheSpec, block_size: int, steps: list[int]
) -> None:
    policy = cache_policy(spec, block_size)
    table: set[int] = set()
    num_computed, most = 0, 0
    for num_tokens in steps:
        end = num_computed + num_tokens
        table.update(policy.takes(num_computed, end))
        most = max(most, len(table))
        table = {index for index in table if policy.needed(end).includes(index)}
        num_computed = end
    assert most <= policy.max_held(num_computed, max(steps))
    assert all(policy.is_writable(position) for position in range(num_computed))


@examples(4)
@given(
    specs | st.just(States(12)),
    st.integers(1, 4),
    st.integers(1, MAX_TOKENS),
    st.integers(0, MAX_TOKENS),
    st.integers(1, 7),
)
def test_a_longer_sequence_holds_at_least_as_much(
    spec: CacheSpec, block_size: int, num_tokens: int, num_more: int, max_step: int
) -> None:
    """So an engine that fits the longest sequence fits all: `EngineLimits.fits_longest`."""
    policy = cache_policy(spec, block_size)
    assert policy.max_held(num_tokens, max_step) <= policy.max_held(num_tokens + num_more, max_step)


@examples(4)
@given(specs, st.integers(1, 4), st.lists(st.sampled_from([0, 0, 0, -1]), max_size=8))
def test_the_longest_beginning_has_all_that_is_needed_after_it(
    spec: CacheSpec, block_size: int, table: list[int]
) -> None:
    policy = cache_policy(spec, block_size)

    def is_served(num_blocks: int) -> bool:
        needed = policy.needed(num_blocks * block_size)
        return all(table[i] >= 0 for i in range(num_blocks) if needed.includes(i))

    for limit in range(len(table) + 1):
        assert policy.serves(table, limit) == max(n for n in range(limit + 1) if is_served(n))
