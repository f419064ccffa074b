"""Positions that one step computes together: whole or not at all, and never for ever not at all."""

import msgspec
import pytest

from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Pool, PoolKind
from loraplex.scheduling.plan_builder import StepBudget
from loraplex.scheduling.prefill import PrefillSplit, SpanClaim
from loraplex.scheduling.request import Span
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY

BUDGET = 32
MEAN = Pool(PoolKind.MEAN)


def fake_engine(*, overlap=False, num_stages=1, num_tokens=BUDGET, **settings):
    capacity = msgspec.structs.replace(
        FAKE_CAPACITY,
        max_num_seqs=8,
        num_stages=num_stages,
        pool_kinds=tuple(PoolKind),
        block_size=4,
    )
    scheduling = SchedulerSettings(max_num_batched_tokens=num_tokens, **settings)
    return FakeEngine(capacity, scheduling, overlap=overlap)


def prompt(start, length):
    return [start + i % 97 for i in range(length)]


def chunks_of(fakes, task):
    """Return (start, number of tokens) of the rows of the only request with a task."""
    plans = fakes.runner.plans
    first, slot = next(
        (index, added.slot)
        for index, plan in enumerate(plans)
        for added in plan.added
        if added.task == task
    )
    plans = plans[first:]
    return [(row.start, row.num_tokens) for plan in plans for row in plan.rows if row.slot == slot]


def end_of(fakes, request_id):
    """Return the code of the error, the vector, and the value that the vector must have."""
    completion = fakes.completions[request_id]
    vector = b"".join(delta.pooled for out in completion.outputs for delta in out.deltas)
    return completion.error_code, vector, fakes.runner.model.pooled(fakes.requests[request_id])


@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_no_chunk_and_no_hit_cuts_a_span(chunk):
    fakes = fake_engine(max_prefill_chunk=chunk)
    fakes.add(prompt(0, 20), max_tokens=1)
    fakes.run()
    whole = fakes.add(prompt(0, 20), task=MEAN)
    fakes.run()
    error, vector, expected = end_of(fakes, whole)
    assert (error, vector) == (None, expected)
    assert chunks_of(fakes, MEAN) == [(0, 20)]
    assert fakes.completions[whole].outputs[-1].timing.num_cached_tokens == 0


@pytest.mark.parametrize(("length", "code"), [(BUDGET, None), (BUDGET + 1, "prompt_too_long")])
def test_a_span_longer_than_a_step_is_refused(length, code):
    fakes = fake_engine()
    request_id = fakes.add(prompt(0, length), task=MEAN)
    fakes.run()
    assert end_of(fakes, request_id)[0] == code
    if code is not None:
        error = fakes.completions[request_id].outputs[-1].error
        assert str(length) in error.message
        assert str(BUDGET) in error.message


def test_a_span_waits_for_rows_before_it_that_decode():
    """They miss no step; it takes all of one, so it waits for the end of the last of them."""
    fakes = fake_engine()
    early = fakes.add([1], max_tokens=12)
    fakes.step()
    whole = fakes.add(prompt(100, BUDGET), task=MEAN)
    fakes.step(11)
    assert fakes.tokens(early) == fakes.alone(early)
    fakes.step()
    error, vector, expected = end_of(fakes, whole)
    assert (error, vector) == (None, expected)


def test_a_span_takes_the_place_of_rows_that_decode_for_one_step():
    """Requests that came later wait for one step, and those before it for none."""
    fakes = fake_engine()
    early = fakes.add([1], max_tokens=40)
    fakes.step(2)
    whole = fakes.add(prompt(100, BUDGET - 2), task=MEAN)
    late = [fakes.add([200 + i], max_tokens=30, priority=1) for i in range(4)]
    fakes.step(4)
    assert end_of(fakes, whole)[0] is None
    assert fakes.completions[whole].is_finished
    fakes.run()
    for request_id in (early, *late):
        assert fakes.tokens(request_id) == fakes.alone(request_id)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_later_requests_do_not_starve_a_span(overlap, num_stages):
    """It fits into no step with one other token, and new requests come in every step."""
    fakes = fake_engine(overlap=overlap, num_stages=num_stages, fair_share="none")
    fakes.add([1], max_tokens=6)
    fakes.step(3)
    whole = fakes.add(prompt(100, BUDGET), task=MEAN)
    for step in range(60):
        if fakes.completions[whole].is_finished:
            break
        fakes.add([200 + step], max_tokens=8)
        fakes.step()
    error, vector, expected = end_of(fakes, whole)
    assert (error, vector) == (None, expected)
    fakes.run()


def test_a_long_prompt_before_a_span_is_not_held_up_by_it():
    fakes = fake_engine()
    long = fakes.add(prompt(0, 200), max_tokens=1)
    for index in range(12):
        fakes.add(prompt(300 + 40 * index, 30), task=MEAN)
    fakes.step(-(-200 // (BUDGET // 2)))
    assert fakes.tokens(long) == fakes.alone(long)
    fakes.run()
    assert all(end_of(fakes, request)[1] == end_of(fakes, request)[2] for request in range(2, 14))


def test_a_shared_step_has_tokens_for_a_span():
    fakes = fake_engine(fair_share="tenant", shared_step_seconds=1e-9)
    fakes.add(prompt(0, 60), max_tokens=30, tenant="us")
    fakes.step(3)
    fakes.engine._scheduler._shared._num_in_target = 1.0
    whole = fakes.add(prompt(100, BUDGET - 2), task=MEAN, tenant="them")
    for step in range(60):
        if fakes.completions[whole].is_finished:
            break
        fakes.add([200 + step], max_tokens=2, tenant="us")
        fakes.step()
    error, vector, expected = end_of(fakes, whole)
    assert (error, vector) == (None, expected)


def sequences_of(fakes, *lengths):
    """Return the waiting sequences of new requests, one for each prompt."""
    ids = [fakes.add(prompt(100 * index, n), max_tokens=1) for index, n in enumerate(lengths)]
    return [fakes.engine._scheduler._state.find(i).sequences[0] for i in ids]


def with_span(sequence, first, end):
    sequence.request.whole_spans = (Span(first, end),)
    return sequence


def test_the_first_row_gets_its_span_whatever_its_share():
    first, short = sequences_of(fake_engine(), 24, 20)
    with_span(first, 0, 24)
    first.slot, short.slot = 0, 1
    split = PrefillSplit(StepBudget(BUDGET), 0.5)
    split.add(first, is_new=False)
    split.add(short, is_new=False)
    assert split.grants() == [(first, 24), (short, 8)]
    assert split.next_claim() is None


@pytest.mark.parametrize("has_slot", [False, True])
def test_the_first_row_claims_the_next_step_and_no_sequence_takes_its_tokens(has_slot):
    first, second = sequences_of(fake_engine(), 24, 20)
    with_span(first, 0, 24)
    split = PrefillSplit(StepBudget(23), 0.5)
    if has_slot:
        first.slot = 0
        split.add(first, is_new=False)
    else:
        assert not split.has_tokens_for(first)
    claim = split.next_claim()
    assert claim == SpanClaim(first, 24)
    following = PrefillSplit(StepBudget(24), 0.5, claim=claim)
    assert not following.has_tokens_for(second)
    if has_slot:
        following.add(first, is_new=False)
    else:
        assert following.has_tokens_for(first)
        first.slot = 0
        following.add(first, is_new=True)
    assert following.grants() == [(first, 24)]
    assert not following.has_tokens_for(second)


def test_which_decoding_rows_are_left_out_for_a_claim():
    first, second, third = sequences_of(fake_engine(), 2, 24, 2)
    claim = SpanClaim(second, 24)
    assert not claim.yields(first, StepBudget(24)), "it comes before the span"
    assert claim.yields(third, StepBudget(24))
    assert not claim.yields(third, StepBudget(25)), "there are tokens for both"
    assert not claim.yields(third, StepBudget(23)), "in vain"


def test_a_row_that_is_not_the_first_claims_nothing():
    first, second, third = sequences_of(fake_engine(), 40, 24, 24)
    first.slot, second.slot = 0, 1
    with_span(second, 0, 24)
    with_span(third, 0, 24)
    split = PrefillSplit(StepBudget(BUDGET), 0.5)
    split.add(first, is_new=False)
    split.add(second, is_new=False)
    assert not split.has_tokens_for(third)
    assert split.grants() == [(first, BUDGET)]
    assert split.next_claim() is None


@pytest.mark.parametrize(
    ("start", "num_tokens", "max_tokens", "expected"),
    [
        (0, 4, 100, 4),
        (0, 7, 100, 5),
        (5, 1, 100, 6),
        (5, 9, 5, 0),
        (5, 6, 6, 6),
        (8, 1, 3, 3),
        (8, 1, 2, 0),
        (5, 8, 100, 8),
        (5, 12, 100, 9),
        (5, 20, 100, 20),
        (5, 20, 14, 9),
        (14, 2, 100, 6),
        (20, 7, 3, 3),
    ],
)
def test_how_many_tokens_fit(start, num_tokens, max_tokens, expected):
    fakes = fake_engine()
    request_id = fakes.add(prompt(0, 30), max_tokens=1)
    request = fakes.engine._scheduler._state.find(request_id)
    request.whole_spans = (Span(5, 11), Span(14, 20))
    sequence = request.sequences[0]
    sequence.num_computed_tokens = start
    assert sequence.num_fitting_tokens(num_tokens, max_tokens) == expected
