"""Outputs of the scheduler for each request since they were last taken."""

import dataclasses

from loraplex.core.errors import ErrorInfo
from loraplex.core.output import (
    EngineOutput,
    LogitsFile,
    PromptLogprobs,
    RequestTiming,
    SequenceDelta,
)
from loraplex.core.request import EngineRequest, RequestId
from loraplex.scheduling.request import Request


@dataclasses.dataclass(slots=True, eq=False)
class _PendingOutput:
    """An EngineOutput under construction."""

    deltas: list[SequenceDelta] = dataclasses.field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    prompt_logits: tuple[LogitsFile, ...] = ()
    finished: bool = False
    error: ErrorInfo | None = None
    timing: RequestTiming | None = None


class OutputQueue:
    """One output per request between two calls of `take`, in the order of their first entries."""

    def __init__(self) -> None:
        self._outputs: dict[RequestId, _PendingOutput] = {}

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, request: Request, delta: SequenceDelta) -> None:
        """Add what a sequence gained, or how it ended."""
        self._output(request.request_id).deltas.append(delta)

    def add_prompt_scores(self, request: Request) -> None:
        """Add the prompt log probabilities and logits that the request wants."""
        output = self._output(request.request_id)
        if request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = PromptLogprobs.of((None, *request.prompt_logprobs))
        output.prompt_logits = tuple(request.prompt_logits)

    def add_timing(self, request: Request) -> None:
        """Add the timing known at the first token: the engine may die before the last one."""
        self._output(request.request_id).timing = request.timing()

    def finish(self, request: Request, error: ErrorInfo | None = None) -> None:
        """Make the request's output its last one."""
        output = self._output(request.request_id)
        assert not output.finished, "a request ended twice"
        output.finished, output.error, output.timing = True, error, request.timing()

    def refuse(self, request: EngineRequest, error: ErrorInfo) -> None:
        """Add the only output of a request that was not accepted."""
        output = self._output(request.request_id)
        output.finished, output.error = True, error
        output.timing = RequestTiming(request.arrival_ns, num_restarts=request.num_restarts)

    def take(self) -> list[EngineOutput]:
        """Return and forget everything since the last call."""
        outputs, self._outputs = self._outputs, {}
        return [
            EngineOutput(
                request_id,
                tuple(output.deltas),
                output.prompt_logprobs,
                output.prompt_logits,
                finished=output.finished,
                error=output.error,
                timing=output.timing,
            )
            for request_id, output in outputs.items()
        ]

    def _output(self, request_id: RequestId) -> _PendingOutput:
        output = self._outputs.get(request_id)
        if output is None:
            output = self._outputs[request_id] = _PendingOutput()
        return output
