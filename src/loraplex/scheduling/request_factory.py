"""Makes the scheduler's requests from those on the wire to the engine."""

import itertools

from loraplex.core.adapter import AdapterHandle
from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Pool
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.pool_request import PoolRequest
from loraplex.scheduling.request import Request, Sequence, Span, StopRules
from loraplex.scheduling.speculation import new_drafters


class RequestFactory:
    """Makes requests whose sequences have unique ids."""

    def __init__(self, capacity: Capacity, settings: SchedulerSettings) -> None:
        self._capacity = capacity
        self._settings = settings
        self._sequence_ids = itertools.count(1)

    def make(
        self, engine_request: EngineRequest, adapters: tuple[tuple[AdapterHandle, float], ...]
    ) -> Request:
        """Return a request with its unfinished sequences.

        After a crash, the sequences continue from the tokens that the former engine had output.
        """
        if isinstance(engine_request.task, Pool):
            return self._pooled(engine_request, adapters)
        sampling = engine_request.sampling
        rules = StopRules(engine_request, self._capacity.max_model_len)
        new_request = Request if sampling.beam is None else BeamRequest
        request = new_request(engine_request, adapters, rules)
        request.rotation_border = self._capacity.rotation_border
        request.wants_prompt_scores = (
            sampling.prompt_logprobs is not None or sampling.return_prompt_logits
        ) and not engine_request.prompt_scores_delivered
        self._set_spans(request)
        outputs = dict(enumerate(engine_request.outputs))
        prompt = engine_request.prompt_token_ids
        drafters = new_drafters(sampling, self._settings, len(prompt))
        request.sequences = [
            Sequence(
                request,
                sequence_id=next(self._sequence_ids),
                index=index,
                token_ids=[*prompt, *outputs.get(index, ())],
                num_prompt_tokens=len(prompt),
                seed=engine_request.request_id if sampling.seed is None else sampling.seed,
                drafter=next(drafters),
            )
            for index in range(sampling.num_sequences)
            if index not in engine_request.ended
        ]
        request.num_unfinished = len(request.sequences)
        return request

    def _pooled(
        self, engine_request: EngineRequest, adapters: tuple[tuple[AdapterHandle, float], ...]
    ) -> PoolRequest:
        request = PoolRequest(engine_request, adapters)
        request.rotation_border = self._capacity.rotation_border
        prompt = list(engine_request.prompt_token_ids)
        self._set_spans(request)
        if request.pool.kind.needs_whole_prompt:
            request.whole_spans = (Span(0, len(prompt)),)
            request.takes_hits = False
        sequence_id = next(self._sequence_ids)
        request.sequences = [Sequence(request, sequence_id, 0, prompt, len(prompt), seed=0)]
        request.num_unfinished = 1
        return request

    def _set_spans(self, request: Request) -> None:
        """Set the spans of images. A prefix hit may end inside one."""
        images = self._capacity.images
        if images is not None and images.is_whole:
            request.whole_spans = tuple(Span(image.first, image.end) for image in request.images)
