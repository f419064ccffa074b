"""Sequences: status transitions and counts."""

import itertools

import pytest

from loraplex.scheduling.request import TRANSITIONS, Request, Sequence, SequenceStatus, StopRules
from support.engine_requests import engine_request as engine_request_of

LEGAL = {
    ("waiting", "running"),
    ("waiting", "finished"),
    ("running", "waiting"),
    ("running", "finished"),
}


def new_sequence() -> Sequence:
    engine_request = engine_request_of((1, 2))
    request = Request(engine_request, (), StopRules(engine_request, 100))
    return Sequence(request, 1, index=0, token_ids=[1, 2, 3], num_prompt_tokens=2, seed=0)


def test_every_status_is_in_the_table():
    assert set(TRANSITIONS) == set(SequenceStatus)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceStatus, repeat=2)))
def test_transitions(old, new):
    sequence = new_sequence()
    sequence.status = old
    if (old, new) in LEGAL:
        sequence.set_status(new)
        assert sequence.status is new
    else:
        with pytest.raises(AssertionError, match=f"{old} -> {new}"):
            sequence.set_status(new)
        assert sequence.status is old


def test_counts_follow_from_the_tokens():
    sequence = new_sequence()
    sequence.num_computed_tokens = 1
    assert (sequence.num_tokens, sequence.num_output_tokens) == (3, 1)
    assert sequence.num_uncomputed_tokens == 2
