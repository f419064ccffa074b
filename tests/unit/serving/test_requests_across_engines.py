"""A request while its engine is dead."""

import asyncio

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.output import FinishReason
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Pool
from loraplex.serving.engines.in_flight_request import KILL_BLAME, InFlightRequest
from support.engine_requests import engine_request


def request_without_engine(**sampling) -> InFlightRequest:
    request = engine_request((5, 6), SamplingParams(max_tokens=4, seed=0, **sampling))
    in_work = InFlightRequest(request, ())
    in_work.lose_engine(KILL_BLAME)
    return in_work


@pytest.mark.parametrize("sequence_index", [None, 0, 1])
def test_a_search_is_aborted_as_a_whole(sequence_index):
    """An engine could not search with fewer sequences than the search is wide."""
    request = request_without_engine(n=2, beam=BeamSearch(width=3))

    assert request.abort(sequence_index)
    assert request.end_aborted()

    (output,) = asyncio.run(request.stream.take())
    assert output.finished
    assert [delta.finish_reason for delta in output.deltas] == [FinishReason.ABORT] * 2


def test_one_of_several_sequences_is_aborted():
    request = request_without_engine(n=2)

    assert request.abort(1)
    assert not request.end_aborted()

    assert request.engine_request().ended == (1,)
    (output,) = asyncio.run(request.stream.take())
    assert [(d.index, d.finish_reason) for d in output.deltas] == [(1, FinishReason.ABORT)]


def test_a_pooled_request_is_computed_again_in_the_next_engine():
    request = msgspec.structs.replace(engine_request((5, 6)), task=Pool())
    in_flight = InFlightRequest(request, [])
    in_flight.lose_engine(KILL_BLAME)
    again = in_flight.engine_request()
    assert again.task == Pool()
    assert (again.outputs, again.ended, again.num_restarts) == (((),), (), 1)
