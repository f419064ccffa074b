"""What the scheduler has to say about each request since it was last asked."""

import dataclasses

from loraplex.core.errors import ErrorInfo
from loraplex.core.output import (
    EngineOutput,
    FinishReason,
    LogitsFile,
    RequestTiming,
    SequenceDelta,
    TokenLogprob,
)
from loraplex.core.request import EngineRequest, RequestId
from loraplex.scheduling.active import ActiveRequest, ActiveSequence


@dataclasses.dataclass(slots=True, eq=False)
class _Draft:
    """An EngineOutput in the making."""

    deltas: list[SequenceDelta] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_logits: tuple[LogitsFile, ...] = ()
    finished: bool = False
    error: ErrorInfo | None = None
    timing: RequestTiming | None = None


class Outbox:
    """One output per request and turn, in the order in which the requests were first named."""

    def __init__(self) -> None:
        self._drafts: dict[RequestId, _Draft] = {}

    def __len__(self) -> int:
        return len(self._drafts)

    def tokens(
        self,
        active: ActiveSequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        logits: tuple[LogitsFile, ...] = (),
    ) -> None:
        """What a sequence gained; with a finish reason, its last delta."""
        index = active.sequence.index
        delta = SequenceDelta(index, token_ids, logprobs, finish_reason, stop_token_id, logits)
        self._draft(active.request.request_id).deltas.append(delta)

    def hypothesis(self, request: ActiveRequest, delta: SequenceDelta) -> None:
        """The only delta of one of the answers of a beam search."""
        self._draft(request.request_id).deltas.append(delta)

    def ended(self, active: ActiveSequence, reason: FinishReason) -> None:
        """A sequence ended without a new token."""
        self.tokens(active, (), (), reason)

    def prompt_scores(self, request: ActiveRequest) -> None:
        """Its prompt's log probabilities and logits, as far as it asked for them."""
        draft = self._draft(request.request_id)
        if request.group.request.sampling.prompt_logprobs is not None:
            draft.prompt_logprobs = (None, *request.prompt_scores)
        draft.prompt_logits = tuple(request.prompt_logits)

    def timing(self, request: ActiveRequest) -> None:
        """What is known by its first token: the engine may not live until its last."""
        self._draft(request.request_id).timing = request.timing()

    def finished(self, request: ActiveRequest, error: ErrorInfo | None = None) -> None:
        """The last word on a request."""
        draft = self._draft(request.request_id)
        assert not draft.finished, "a request ended twice"
        draft.finished, draft.error, draft.timing = True, error, request.timing()

    def refused(self, request: EngineRequest, error: ErrorInfo) -> None:
        """The first and last word on a request that was not accepted."""
        draft = self._draft(request.request_id)
        draft.finished, draft.error = True, error
        draft.timing = RequestTiming(request.arrival_ns, num_restarts=request.num_restarts)

    def take(self) -> list[EngineOutput]:
        """Everything since the last call."""
        drafts, self._drafts = self._drafts, {}
        return [
            EngineOutput(
                request_id,
                tuple(draft.deltas),
                draft.prompt_logprobs,
                draft.prompt_logits,
                finished=draft.finished,
                error=draft.error,
                timing=draft.timing,
            )
            for request_id, draft in drafts.items()
        ]

    def _draft(self, request_id: RequestId) -> _Draft:
        draft = self._drafts.get(request_id)
        if draft is None:
            draft = self._drafts[request_id] = _Draft()
        return draft
