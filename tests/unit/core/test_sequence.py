"""One generation in progress."""

import itertools

import pytest

from loraplex.core.sampling_params import SamplingParams
from loraplex.core.sequence import TRANSITIONS, Sequence, SequenceGroup, SequenceStatus
from support.engine_requests import engine_request

LEGAL = {
    ("waiting", "running"),
    ("waiting", "finished"),
    ("running", "waiting"),
    ("running", "finished"),
}


def new_sequence(index: int = 0) -> Sequence:
    return Sequence(sequence_id=1, index=index, token_ids=[1, 2, 3], num_prompt_tokens=2, seed=0)


def test_every_status_is_in_the_table():
    assert set(TRANSITIONS) == set(SequenceStatus)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceStatus, repeat=2)))
def test_transitions(old, new):
    sequence = new_sequence()
    sequence.status = old
    if (old, new) in LEGAL:
        sequence.become(new)
        assert sequence.status is new
    else:
        with pytest.raises(AssertionError, match=f"{old} -> {new}"):
            sequence.become(new)
        assert sequence.status is old


def test_counts_follow_from_the_tokens():
    sequence = new_sequence()
    sequence.num_computed_tokens = 1
    assert (sequence.num_tokens, sequence.num_output_tokens) == (3, 1)
    assert sequence.num_uncomputed_tokens == 2


def test_a_group_ends_with_its_last_sequence():
    request = engine_request((1, 2), SamplingParams(n=2), request_id=7, tenant="default")
    group = SequenceGroup(request, [new_sequence(0), new_sequence(1)], ())
    assert group.request_id == 7
    for sequence in group.sequences:
        assert not group.is_finished
        sequence.become(SequenceStatus.FINISHED)
    assert group.is_finished
