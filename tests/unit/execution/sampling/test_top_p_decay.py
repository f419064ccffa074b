import pytest

from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.sampling.rows import DecayingTopP

PARAMS = SamplingParams(top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_id=7)


def test_falls_to_the_minimum_and_comes_back_after_the_reset_token():
    top_p = DecayingTopP(PARAMS, ())
    values = [top_p.after(())]
    for token_id in (1, 2, 3, 7, 4):
        top_p.add([token_id])
        values.append(top_p.after(()))
    assert values == [0.8, 0.4, 0.3, 0.3, 0.8, 0.4]


def test_is_a_function_of_the_output():
    output = (1, 7, 2, 3, 1)
    whole, grown = DecayingTopP(PARAMS, output), DecayingTopP(PARAMS, output[:2])
    assert grown.after(output[2:]) == whole.after(())
    assert grown.after(()) == 0.8
    grown.add(output[2:])
    assert grown.after(()) == whole.after(())


@pytest.mark.parametrize(
    ("fields", "matters"),
    [
        ({}, False),
        ({"top_p": 0.9}, False),
        ({"top_p_decay": 0.9}, True),
        ({"top_p": 0.2, "top_p_min": 0.5}, True),
        ({"top_p_reset_id": 3}, False),
    ],
)
def test_matters_only_where_it_changes(fields, matters):
    assert DecayingTopP.matters(SamplingParams(**fields)) is matters
