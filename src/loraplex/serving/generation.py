"""One request's way back: the engine's tokens become text, and end where the client said."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Protocol

from loraplex.core.errors import error_from_info
from loraplex.core.output import (
    EngineOutput,
    Logits,
    PromptLogprobs,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceDelta,
    SequenceOutput,
)
from loraplex.core.request import EngineRequest, GenerateRequest, RequestId
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Pool
from loraplex.serving.best_of import BestOf
from loraplex.serving.engines.in_flight_request import EngineOutputs, OutputStream
from loraplex.serving.logits_files import files_of, read_and_delete
from loraplex.serving.text.sequence_text import SequenceText
from loraplex.text.tokenizer import Tokenizer

_FEW_TOKENS: Final = 32
"""Tokens whose text is formatted at once, between the outputs of other requests."""


class Aborter(Protocol):
    """What a generation needs of the engine: `AsyncEngine` is one."""

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None: ...


class _Outputs(AsyncIterator[RequestOutput]):
    """The iterator that a front end reads: one request's EngineOutputs as RequestOutputs."""

    def __init__(
        self,
        request: GenerateRequest,
        engine_request: EngineRequest,
        adapters: tuple[ResolvedAdapter, ...],
        stream: EngineOutputs,
        engine: Aborter,
    ) -> None:
        self._request = request
        self._engine_request = engine_request
        self.adapters = adapters
        self._stream = stream
        self._engine = engine
        self._finished = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    @property
    def _prompt_token_ids(self) -> tuple[int, ...]:
        """RequestOutput.prompt_token_ids"""
        request = self._engine_request
        return request.encoder_token_ids + request.prompt_token_ids

    def when_ready(self, read: Callable[[], bool]) -> None:
        """Implements ReadyOutputs."""
        if isinstance(self._stream, OutputStream):
            self._stream.when_ready(read)

    def take_ready(self) -> RequestOutput | None:
        """Implements ReadyOutputs; None by default."""
        return None

    def cancel(self) -> None:
        """Implements Cancellable."""
        if not self._finished:
            self._engine.abort(self._engine_request.request_id)

    async def aclose(self) -> None:
        """Abort the request unless it is over, whether or not anything was read."""
        self._stream.leave()
        if not self._finished:
            self._finished = True
            self._engine.abort(self._engine_request.request_id)


class Generation(_Outputs):
    """Outputs of a request that generates.

    The output of a beam search comes whole, at once. With best_of, the n best come in the last
    output. Not an async generator, whose clean-up would not run if it is closed before its first
    item.
    """

    def __init__(
        self,
        request: GenerateRequest,
        engine_request: EngineRequest,
        adapters: tuple[ResolvedAdapter, ...],
        tokenizer: Tokenizer,
        stream: EngineOutputs,
        engine: Aborter,
    ) -> None:
        super().__init__(request, engine_request, adapters, stream, engine)
        self._num_output_tokens = 0
        self._sequences = [
            SequenceText(
                tokenizer,
                engine_request.prompt_token_ids,
                engine_request.sampling,
                request.shown_special_ids,
            )
            for _ in range(engine_request.task.num_returned)
        ]
        self._best_of = _best_of(request.sampling)
        self._prompt_logprobs: PromptLogprobs | None = None
        self._prompt_logits: tuple[Logits, ...] = ()
        """Logits of the prompt, until an output takes them along."""

    async def __anext__(self) -> RequestOutput:
        """The next increment. Raises the request's error."""
        while not self._finished:
            engine_outputs = await self._stream.take()
            self._finished = engine_outputs[-1].finished
            output = self._merge(engine_outputs, await _logits_of(engine_outputs))
            if output.sequences or output.finished:
                self._prompt_logprobs, self._prompt_logits = None, ()
                return output
        raise StopAsyncIteration

    def take_ready(self) -> RequestOutput | None:
        """Return the next increment, if it is a small one in the middle of the request.

        Ends, errors, files and what takes long to format are read by `anext`.
        """
        stream = self._stream
        if self._best_of is not None or not isinstance(stream, OutputStream):
            return None
        deltas = _plain_deltas(stream.pending)
        if deltas is None:
            return None
        stream.take_pending()
        pieces = (self._push(delta, {}) for delta in deltas)
        sequences = tuple([piece for piece in pieces if piece is not None])
        return self._output(sequences, finished=False, timing=None)

    def _merge(
        self, engine_outputs: Sequence[EngineOutput], logits: Mapping[str, Logits]
    ) -> RequestOutput:
        last = engine_outputs[-1]
        for output in engine_outputs:
            if output.prompt_logprobs is not None:
                self._prompt_logprobs = output.prompt_logprobs
            self._prompt_logits += tuple(logits[file.path] for file in output.prompt_logits)
        deltas = [delta for output in engine_outputs for delta in output.deltas]
        pieces = [self._push(delta, logits) for delta in deltas]
        if last.error is not None and not self._has_all_text:
            raise error_from_info(last.error)
        timing = last.timing
        if last.finished and timing is None:
            timing = RequestTiming(self._engine_request.arrival_ns)
        return self._output(
            self._returned([piece for piece in pieces if piece is not None], last.finished),
            finished=last.finished,
            timing=timing if last.finished else None,
        )

    @property
    def _has_all_text(self) -> bool:
        """Every sequence met its end: an error of the engine comes too late to matter."""
        return all(sequence.is_finished for sequence in self._sequences)

    def _push(self, delta: SequenceDelta, logits: Mapping[str, Logits]) -> SequenceOutput | None:
        sequence = self._sequences[delta.index]
        if sequence.is_finished:
            return None
        piece = sequence.push(
            delta,
            self._engine_request.eos_token_ids,
            [logits[file.path] for file in delta.logits],
        )
        self._num_output_tokens += len(piece.token_ids)
        if piece.finish_reason is not None and delta.finish_reason is None:
            self._engine.abort(self._engine_request.request_id, delta.index)
        return piece

    def _returned(
        self, pieces: Sequence[SequenceOutput], is_last: bool
    ) -> tuple[SequenceOutput, ...]:
        """What the client gets of them now."""
        if self._best_of is None:
            return tuple(pieces)
        for piece in pieces:
            self._best_of.add(piece)
        return self._best_of.best() if is_last else ()

    def _output(
        self, sequences: tuple[SequenceOutput, ...], *, finished: bool, timing: RequestTiming | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request.request_id,
            client_request_id=self._request.client_request_id,
            model=self._request.model,
            adapters=self.adapters,
            prompt_token_ids=self._prompt_token_ids,
            num_encoder_tokens=len(self._engine_request.encoder_token_ids),
            sequences=sequences,
            num_output_tokens=self._num_output_tokens,
            finished=finished,
            prompt_logprobs=self._prompt_logprobs,
            timing=timing,
            prompt_logits=self._prompt_logits,
        )


class Pooling(_Outputs):
    """Outputs of a pooled request: one, with its vector."""

    async def __anext__(self) -> RequestOutput:
        """Return the output. Raises the request's error."""
        if self._finished:
            raise StopAsyncIteration
        deltas: list[SequenceDelta] = []
        while not self._finished:
            outputs = await self._stream.take()
            deltas += [delta for output in outputs for delta in output.deltas]
            self._finished = outputs[-1].finished
        if outputs[-1].error is not None:
            raise error_from_info(outputs[-1].error)
        return RequestOutput(
            request_id=self._request.request_id,
            client_request_id=self._request.client_request_id,
            model=self._request.model,
            adapters=self.adapters,
            prompt_token_ids=self._prompt_token_ids,
            num_encoder_tokens=len(self._engine_request.encoder_token_ids),
            sequences=tuple(
                SequenceOutput(delta.index, "", (), (), delta.finish_reason) for delta in deltas
            ),
            num_output_tokens=0,
            finished=True,
            timing=outputs[-1].timing,
            pooled=b"".join(delta.pooled for delta in deltas),
        )


def outputs_of(
    request: GenerateRequest,
    engine_request: EngineRequest,
    adapters: tuple[ResolvedAdapter, ...],
    tokenizer: Tokenizer,
    stream: EngineOutputs,
    engine: Aborter,
) -> Generation | Pooling:
    """Return the iterator of an admitted request."""
    if isinstance(engine_request.task, Pool):
        return Pooling(request, engine_request, adapters, stream, engine)
    return Generation(request, engine_request, adapters, tokenizer, stream, engine)


def _plain_deltas(outputs: Sequence[EngineOutput]) -> Sequence[SequenceDelta] | None:
    """Return the deltas of outputs that bring a few tokens and nothing else; None for others."""
    num_tokens = 0
    deltas: list[SequenceDelta] = []
    for output in outputs:
        if output.finished or output.prompt_logprobs is not None or output.prompt_logits:
            return None
        for delta in output.deltas:
            if delta.finish_reason is not None or delta.logprobs or delta.logits:
                return None
            num_tokens += len(delta.token_ids)
            deltas.append(delta)
    return deltas if 0 < num_tokens <= _FEW_TOKENS else None


async def _logits_of(outputs: Sequence[EngineOutput]) -> Mapping[str, Logits]:
    """Read logits by path. They may be large, so a thread reads them, to the end if we leave."""
    files = list(files_of(outputs))
    return await asyncio.to_thread(read_and_delete, files) if files else {}


def _best_of(sampling: SamplingParams) -> BestOf | None:
    """None: what is made comes back as it is made."""
    if sampling.beam is not None or sampling.num_sequences == sampling.n:
        return None
    return BestOf(sampling.num_sequences, sampling.n, shows_logprobs=sampling.logprobs is not None)
