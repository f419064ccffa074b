"""A long prompt does not starve short ones, nor short ones a long one; no token is left over."""

import math

import msgspec
import pytest

from loraplex.core.scheduler_settings import SchedulerSettings
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY

BUDGET = 32
SHORT, LONG = 40, 400


def fake_engine(shortest_share=0.5, **settings):
    capacity = msgspec.structs.replace(FAKE_CAPACITY, max_num_seqs=8)
    return FakeEngine(
        capacity,
        SchedulerSettings(
            max_num_batched_tokens=BUDGET, shortest_prefill_share=shortest_share, **settings
        ),
    )


def prompt(start, length):
    return [start + i % 97 for i in range(length)]


def steps_to_first_token(fakes, request_id, max_steps=200):
    for step in range(1, max_steps):
        fakes.step()
        if fakes.tokens(request_id):
            return step
    raise AssertionError("no token")


def steps_to_end(fakes):
    fakes.run()
    return len(fakes.records)


@pytest.mark.parametrize("num_longs", [1, 3])
@pytest.mark.parametrize("num_decoding", [0, 5])
def test_a_short_prompt_behind_long_ones(num_longs, num_decoding):
    """Its bound: ceil(S / (share * B')) steps, where B' is what decoding rows leave."""
    fakes = fake_engine()
    for index in range(num_decoding):
        fakes.add([index + 1], max_tokens=100)
    fakes.step(2)
    for index in range(num_longs):
        fakes.add(prompt(100 * index, LONG), max_tokens=1)
    fakes.step(2)
    short = fakes.add(prompt(900, SHORT), max_tokens=1)
    bound = math.ceil(SHORT / int(0.5 * (BUDGET - num_decoding)))
    assert steps_to_first_token(fakes, short) <= bound
    fakes.run()
    for request_id in fakes.requests:
        assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_in_policy_order_alone_it_would_wait_for_the_long_one():
    fakes = fake_engine(shortest_share=0.0)
    fakes.add(prompt(0, LONG), max_tokens=1)
    fakes.step(2)
    short = fakes.add(prompt(900, SHORT), max_tokens=1)
    assert steps_to_first_token(fakes, short) >= (LONG - 2 * BUDGET) // BUDGET


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    """It has at least the rest of the budget, (1 - share) * B', in every step."""
    fakes = fake_engine()
    long = fakes.add(prompt(0, LONG), max_tokens=1)
    bound = math.ceil(LONG / (BUDGET - 4 - int(0.5 * (BUDGET - 4))))
    for step in range(1, 200):
        fakes.add(prompt(100 + step, 20), max_tokens=2)
        fakes.step()
        if fakes.tokens(long):
            break
    assert step <= bound
    fakes.run()


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("lengths", [(400, 40, 40), (90, 300, 10, 70), (64, 64, 64)])
def test_the_share_of_the_shortest_costs_no_throughput(lengths, chunk):
    ends = set()
    for share in (0.0, 0.5, 0.9):
        fakes = fake_engine(share, max_prefill_chunk=chunk)
        for index, length in enumerate(lengths):
            fakes.add(prompt(100 * index, length), max_tokens=1)
        num_left = sum(lengths)
        while num_left:
            fakes.step()
            num_computed = fakes.records[-1].num_tokens
            if chunk is None:
                assert num_computed == min(BUDGET, num_left)
            num_left -= num_computed
        ends.add(steps_to_end(fakes))
    assert chunk is not None or len(ends) == 1


def test_equal_prompts_are_computed_one_after_the_other():
    fakes = fake_engine()
    first, second = (fakes.add(prompt(100 * i, 96), max_tokens=1) for i in range(2))
    fakes.step(3)
    assert fakes.tokens(first) == fakes.alone(first)
    assert fakes.tokens(second) == []
    fakes.run()


def test_a_short_prompt_of_lower_priority_does_not_pass():
    fakes = fake_engine()
    long = fakes.add(prompt(0, LONG), max_tokens=1)
    fakes.step()
    short = fakes.add(prompt(900, SHORT), max_tokens=1, priority=1)
    urgent = fakes.add(prompt(500, LONG), max_tokens=1, priority=-1)
    fakes.run()
    ends = [fakes.completions[r].outputs[-1].timing.first_token_ns for r in (urgent, long, short)]
    assert ends == sorted(ends)
