"""The outputs of one request to an EchoBackend, and the error that a test planted in them."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.output import Logits, RequestOutput, RequestTiming, ResolvedAdapter
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.serving.backend import ModelCard
from loraplex.serving.best_of import joined
from loraplex.testing import echo_tokenizer
from loraplex.testing.echo_model import EchoState
from loraplex.testing.echo_sequence import EchoSequence, echo_logits, echo_logprob, echo_text


class Fault(msgspec.Struct, frozen=True):
    """An error that the next request meets."""

    error: LoraplexError
    after_outputs: int | None
    """None: raised by `await generate(...)`; k: by the iterator, after k outputs."""


class EchoStream(AsyncIterator[RequestOutput]):
    """The outputs of one request. Closed or cancelled before its end, it counts as aborted."""

    def __init__(
        self,
        state: EchoState,
        card: ModelCard,
        request: GenerateRequest,
        prompt_token_ids: tuple[int, ...],
        adapters: tuple[ResolvedAdapter, ...],
        fault: Fault | None,
    ) -> None:
        self._state = state
        self._card = card
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._adapters = adapters
        self._fault = fault
        self._is_over = False
        self._outputs = self._run()

    async def __anext__(self) -> RequestOutput:
        return await anext(self._outputs)

    async def aclose(self) -> None:
        """Abort, unless the request is over."""
        self._end(self._state.aborted)
        await self._outputs.aclose()

    def _end(self, record: list[RequestId]) -> None:
        if not self._is_over:
            self._is_over = True
            record.append(self._request.request_id)

    async def _run(self) -> AsyncGenerator[RequestOutput, None]:
        sequences = self._sequences()
        try:
            for num_outputs in itertools.count():
                if self._fault is not None and self._fault.after_outputs == num_outputs:
                    self._end(self._state.finished)
                    raise self._fault.error
                await asyncio.sleep(self._state.delay_seconds)
                output = self._step(sequences, is_first=num_outputs == 0)
                if self._comes_whole:
                    output = self._whole(sequences, output)
                if output.finished:
                    self._end(self._state.finished)
                yield output
                if output.finished:
                    return
        finally:
            self._end(self._state.aborted)

    @property
    def _comes_whole(self) -> bool:
        """Whether outputs come only at the end, when it is known which of them are returned."""
        sampling = self._request.sampling
        return sampling.beam is not None or sampling.num_sequences > sampling.n

    def _whole(self, sequences: Sequence[EchoSequence], output: RequestOutput) -> RequestOutput:
        """All that is left, in one output."""
        outputs = [output]
        while not outputs[-1].finished:
            outputs.append(self._step(sequences, is_first=False))
        pieces = [piece for step in outputs for piece in step.sequences]
        wholes = (joined([p for p in pieces if p.index == i]) for i in range(len(sequences)))
        return msgspec.structs.replace(
            outputs[-1],
            sequences=tuple(
                msgspec.structs.replace(
                    whole, cumulative_logprob=sum(entry.logprob for entry in whole.logprobs)
                )
                for whole in wholes
            ),
            prompt_logprobs=output.prompt_logprobs,
            prompt_logits=output.prompt_logits,
        )

    def _sequences(self) -> list[EchoSequence]:
        request = self._request
        prompt = echo_tokenizer.decode(self._prompt_token_ids)
        names = [adapter.name for adapter in self._adapters]
        max_tokens = self._card.max_model_len - len(self._prompt_token_ids)
        texts: Sequence[str] = [
            echo_text(request.model, names, prompt, index) for index in range(request.sampling.n)
        ]
        if self._state.scripts:
            texts = self._state.scripts.popleft()
        return [
            EchoSequence(index, text, request.sampling, max_tokens)
            for index, text in enumerate(texts)
        ]

    def _step(self, sequences: Sequence[EchoSequence], *, is_first: bool) -> RequestOutput:
        running = [sequence for sequence in sequences if not sequence.is_finished]
        outputs = tuple(sequence.step() for sequence in running)
        is_last = all(sequence.is_finished for sequence in sequences)
        return RequestOutput(
            request_id=self._request.request_id,
            client_request_id=self._request.client_request_id,
            model=self._request.model,
            adapters=self._adapters,
            prompt_token_ids=self._prompt_token_ids,
            sequences=outputs,
            num_output_tokens=sum(sequence.num_tokens for sequence in sequences),
            finished=is_last,
            prompt_logprobs=self._prompt_logprobs() if is_first else None,
            timing=self._timing() if is_last else None,
            prompt_logits=self._prompt_logits() if is_first else (),
        )

    def _prompt_logits(self) -> tuple[Logits, ...]:
        if not self._request.sampling.return_prompt_logits:
            return ()
        return (echo_logits(self._prompt_token_ids),)

    def _prompt_logprobs(self) -> tuple[Any, ...] | None:
        num_top = self._request.sampling.prompt_logprobs
        if num_top is None:
            return None
        return (None, *(echo_logprob(token_id, num_top) for token_id in self._prompt_token_ids[1:]))

    def _timing(self) -> RequestTiming:
        return RequestTiming(arrival_ns=0, num_cached_tokens=self._state.num_cached_tokens)
