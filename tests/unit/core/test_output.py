"""Outputs, and the timing of a request in seconds and across engines."""

import gc

import pytest

from loraplex.core.output import (
    EngineOutput,
    RequestOutput,
    RequestTiming,
    SequenceDelta,
    SequenceOutput,
)

TIMING = RequestTiming(
    arrival_ns=10**9,
    adapter_ready_ns=3 * 10**9,
    first_scheduled_ns=4 * 10**9,
    first_token_ns=6 * 10**9,
    last_token_ns=9 * 10**9,
    num_preemptions=1,
    num_cached_tokens=32,
    adapter_load_ns=5 * 10**8,
    adapter_copy_ns=10**8,
    num_output_tokens=4,
    first_step=20,
    last_step=27,
)


def test_the_garbage_collector_visits_no_outputs():
    """Many wait for the end of a request; to visit them would stop the event loop."""
    token_ids = tuple(range(3))
    delta = SequenceDelta(0, token_ids)
    piece = SequenceOutput(0, "x", token_ids, (), None)
    outputs = [
        *(delta, piece, EngineOutput(1, (delta,))),
        RequestOutput(1, "", "m", (), token_ids, (piece,), 3, False),
    ]
    assert not any(map(gc.is_tracked, outputs))


def test_seconds():
    assert TIMING.queue_seconds == 3
    assert TIMING.adapter_wait_seconds == 2
    assert TIMING.adapter_load_seconds == 0.5
    assert TIMING.adapter_copy_seconds == 0.1
    assert TIMING.prefill_seconds == 2
    assert TIMING.first_token_seconds == 5
    assert TIMING.seconds_per_token == 1
    assert TIMING.total_seconds == 8


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_what_has_not_happened_has_no_time(num_tokens):
    timing = RequestTiming(arrival_ns=5, num_output_tokens=num_tokens)
    assert timing.queue_seconds is None
    assert timing.adapter_wait_seconds is None
    assert timing.prefill_seconds is None
    assert timing.first_token_seconds is None
    assert timing.seconds_per_token is None
    assert timing.total_seconds is None
    assert RequestTiming(5, last_token_ns=9, first_token_ns=9).seconds_per_token is None


def test_first_things_stay_and_counts_are_added():
    again = RequestTiming(
        arrival_ns=10**9,
        adapter_ready_ns=13 * 10**9,
        first_scheduled_ns=14 * 10**9,
        first_token_ns=16 * 10**9,
        last_token_ns=19 * 10**9,
        num_preemptions=2,
        num_cached_tokens=8,
        adapter_load_ns=10**8,
        adapter_copy_ns=10**8,
        num_output_tokens=9,
        num_restarts=1,
        first_step=1,
        last_step=6,
    )
    whole = again.since(TIMING)
    assert whole.adapter_ready_ns == TIMING.adapter_ready_ns
    assert whole.first_scheduled_ns == TIMING.first_scheduled_ns
    assert whole.first_token_ns == TIMING.first_token_ns
    assert whole.last_token_ns == again.last_token_ns
    assert (whole.num_preemptions, whole.num_cached_tokens) == (3, 32)
    assert (whole.adapter_load_ns, whole.adapter_copy_ns) == (6 * 10**8, 2 * 10**8)
    assert (whole.num_output_tokens, whole.num_restarts) == (9, 1)
    assert (whole.first_step, whole.last_step) == (1, 6)


def test_an_engine_without_a_step_leaves_the_steps_of_the_former():
    whole = RequestTiming(arrival_ns=1).since(TIMING)
    assert (whole.first_step, whole.last_step) == (20, 27)


def test_an_engine_that_died_before_the_first_step_counts_for_nothing():
    again = RequestTiming(arrival_ns=1, first_scheduled_ns=7, first_token_ns=8, last_token_ns=9)
    assert again.since(RequestTiming(arrival_ns=1)) == again
