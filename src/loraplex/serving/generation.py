"""One request's way back: the engine's tokens become text, and end where the client said."""

from collections.abc import Sequence
from typing import Protocol

from loraplex.core.errors import error_from_info
from loraplex.core.output import (
    EngineOutput,
    FinishReason,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceDelta,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.core.request import EngineRequest, GenerateRequest, RequestId
from loraplex.core.sampling_params import SamplingParams
from loraplex.serving.detokenizer import IncrementalDetokenizer
from loraplex.serving.output_stream import OutputStream
from loraplex.serving.stop_strings import StopStrings
from loraplex.serving.tokenizer import Tokenizer


class Aborter(Protocol):
    """What a generation needs of the engine: `AsyncEngine` is one."""

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None: ...


class SequenceText:
    """The text of one sequence, and whether and why it has ended."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stop_strings = StopStrings(sampling.stop, sampling.include_stop_in_output)
        self._shows_stop_token = sampling.include_stop_in_output
        self.is_finished = False

    def push(self, delta: SequenceDelta, eos_token_ids: Sequence[int]) -> SequenceOutput:
        """What the delta adds. After a stop string matched, `is_finished` is set."""
        is_final = delta.finish_reason is not None
        shown = delta.token_ids
        if delta.stop_token_id is not None and not self._shows_stop_token:
            shown = shown[:-1]
        text = self._detokenizer.push(shown, final=is_final)
        text, stop = self._stop_strings.push(text, final=is_final)
        reason = FinishReason.STOP if stop is not None else delta.finish_reason
        self.is_finished = reason is not None
        stop_reason: str | int | None = stop
        if stop is None and delta.stop_token_id not in eos_token_ids:
            stop_reason = delta.stop_token_id
        return SequenceOutput(
            index=delta.index,
            text=text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
        )


class Generation:
    """The iterator that a front end reads: one request's EngineOutputs as RequestOutputs.

    Not an async generator, whose clean-up would not run if it is closed before its first item.
    """

    def __init__(
        self,
        request: GenerateRequest,
        engine_request: EngineRequest,
        adapters: tuple[ResolvedAdapter, ...],
        tokenizer: Tokenizer,
        stream: OutputStream,
        engine: Aborter,
    ) -> None:
        self._request = request
        self._engine_request = engine_request
        self._adapters = adapters
        self._stream = stream
        self._engine = engine
        self._num_output_tokens = 0
        self._finished = False
        self._sequences = [
            SequenceText(tokenizer, engine_request.prompt_token_ids, engine_request.sampling)
            for _ in range(engine_request.sampling.n)
        ]

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> RequestOutput:
        """The next increment. Raises the request's error."""
        while not self._finished:
            engine_outputs = await self._stream.take()
            self._finished = engine_outputs[-1].finished
            output = self._merge(engine_outputs)
            if output.sequences or output.finished:
                return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request unless it is over, whether or not anything was read."""
        if not self._finished:
            self._finished = True
            self._engine.abort(self._engine_request.request_id)

    def _merge(self, engine_outputs: Sequence[EngineOutput]) -> RequestOutput:
        last = engine_outputs[-1]
        pieces = [self._push(delta) for output in engine_outputs for delta in output.deltas]
        if last.error is not None and not self._has_all_text:
            raise error_from_info(last.error)
        prompt_logprobs = (output.prompt_logprobs for output in engine_outputs)
        timing = last.timing or RequestTiming(self._engine_request.arrival_ns)
        return self._output(
            tuple(piece for piece in pieces if piece is not None),
            next((logprobs for logprobs in prompt_logprobs if logprobs is not None), None),
            finished=last.finished,
            timing=timing if last.finished else None,
        )

    @property
    def _has_all_text(self) -> bool:
        """Every sequence met its end: an error of the engine comes too late to matter."""
        return all(sequence.is_finished for sequence in self._sequences)

    def _push(self, delta: SequenceDelta) -> SequenceOutput | None:
        sequence = self._sequences[delta.index]
        if sequence.is_finished:
            return None
        self._num_output_tokens += len(delta.token_ids)
        piece = sequence.push(delta, self._engine_request.eos_token_ids)
        if piece.finish_reason is not None and delta.finish_reason is None:
            self._engine.abort(self._engine_request.request_id, delta.index)
        return piece

    def _output(
        self,
        sequences: tuple[SequenceOutput, ...],
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None,
        *,
        finished: bool,
        timing: RequestTiming | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request.request_id,
            client_request_id=self._request.client_request_id,
            model=self._request.model,
            adapters=self._adapters,
            prompt_token_ids=self._engine_request.prompt_token_ids,
            sequences=sequences,
            num_output_tokens=self._num_output_tokens,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            timing=timing,
        )
