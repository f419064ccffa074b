"""What a beam search over a FakeModel gives, without an engine."""

from collections.abc import Sequence

from loraplex.core.request import EngineRequest
from loraplex.scheduling.beam_request import new_beam_searcher
from loraplex.scheduling.beams import Hypothesis
from loraplex.scheduling.request import StopRules
from support.fake_model import FakeModel


def search_alone(
    model: FakeModel, request: EngineRequest, max_model_len: int
) -> Sequence[Hypothesis]:
    """Return the best hypotheses of a beam search request, the best first; up to n of them."""
    rules = StopRules(request, max_model_len)
    search = new_beam_searcher(request, rules)
    adapters = [(use.digest, use.scale) for use in request.adapters]
    while not search.is_over:
        candidates = []
        for beam in search.beams:
            token_ids = (*request.prompt_token_ids, *beam.token_ids)
            state = model.prompt(token_ids, request.images, adapters, request.encoder_token_ids)[-1]
            candidates.append(
                model.candidates(
                    state,
                    search.num_candidates,
                    request.sampling,
                    len(beam.token_ids),
                    rules.suppressed_token_ids,
                )
            )
        search.advance(candidates)
    return search.hypotheses[: request.sampling.n]
