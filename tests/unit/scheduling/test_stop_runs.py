"""Runs of tokens that end an output."""

import pytest

from loraplex.core.output import FinishReason
from loraplex.core.sampling_params import SamplingParams
from loraplex.scheduling.request import Stop, StopRules
from support.engine_requests import engine_request


def rules(**sampling):
    request = engine_request(
        (1, 2, 3), SamplingParams(max_tokens=10, **sampling), eos_token_ids=(0,), arrival_ns=1
    )
    return StopRules(request, 100)


@pytest.mark.parametrize(
    ("output", "stop"),
    [
        ((5, 6), Stop(FinishReason.STOP)),
        ((4, 5, 6), Stop(FinishReason.STOP)),
        ((5, 6, 4), None),
        ((6,), None),
        ((3, 4), None),
        ((7,), Stop(FinishReason.STOP, 7)),
        ((0,), Stop(FinishReason.STOP, 0)),
        ((4,) * 10, Stop(FinishReason.LENGTH)),
        ((4,) * 8 + (5, 6), Stop(FinishReason.STOP)),
    ],
)
def test_a_run_ends_the_output_that_it_lies_in(output, stop):
    """(3, 4) begins with the prompt's last token only; a run of one token is a stop token."""
    found = rules(stop_token_sequences=((5, 6), (3, 3, 4), (7,)))
    assert found.after((1, 2, 3, *output), 3) == stop
    assert found.num_stop_tokens == 2


def test_a_run_ends_the_output_before_the_minimum_too():
    """A stop run ends the output like a stop string: the model is not kept from it."""
    found = rules(stop_token_sequences=((5, 6), (7,)), min_tokens=2)
    assert found.after((1, 2, 3, 5, 6), 3) == Stop(FinishReason.STOP)
    assert found.after((1, 2, 3, 7), 3) == Stop(FinishReason.STOP, 7)
    assert found.suppressed_token_ids == (0,)
