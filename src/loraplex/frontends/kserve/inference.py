"""One admitted inference request: the outputs of its batch, in one response or as a stream.

Another request can stop it. A stop request has the client's id of that request; without an id it
means the requests of its own stream.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import msgspec

from loraplex.core.errors import InvalidRequestError, LoraplexError
from loraplex.core.output import RequestOutput, ResolvedAdapter, SequenceOutput
from loraplex.frontends.kserve.errors import vllm_failure
from loraplex.frontends.kserve.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    ResponseStream,
)
from loraplex.frontends.kserve.models.convert import TritonGeneration
from loraplex.frontends.kserve.models.kinds import BackendDialect
from loraplex.frontends.kserve.models.output_tensors import (
    SequenceSoFar,
    output_tensors,
    without_batch,
)
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.statistics import Recording, TokenTimes
from loraplex.frontends.kserve.tensors import Tensor
from loraplex.frontends.streams import done
from loraplex.serving.backend import close_outputs
from loraplex.serving.interleaving import interleaved

T = TypeVar("T")


class StopSignal:
    """Said by anyone on the loop, once; it ends the wait of the one reader, if that waits."""

    is_set = False
    _reader: asyncio.Task[object] | None = None
    _has_interrupted = False

    def set(self) -> None:
        """Idempotent."""
        if not self.is_set:
            self.is_set = True
            if self._reader is not None:
                self._has_interrupted = True
                self._reader.cancel()

    async def result_before_stop(self, read: Callable[[], Awaitable[T]]) -> T | None:
        """What it reads, or None as soon as stop is said."""
        if self.is_set:
            return None
        self._reader = reader = asyncio.current_task()
        try:
            return await read()
        except asyncio.CancelledError:
            # Others may have cancelled the reader, too: that is not ours to end.
            if not self._has_interrupted or reader is None or reader.uncancel() > 0:
                raise
            return None
        finally:
            self._reader = None


class StreamScope:
    """One bidirectional stream of a client. Only its identity matters."""


class ActiveRequest(StopSignal):
    """Once it is stopped, it ends with what it has."""

    def __init__(
        self, others: "ActiveRequests", key: tuple[str, str], scope: StreamScope | None
    ) -> None:
        """key: its tenant, and the client's request id."""
        self.key = key
        self.scope = scope
        self._others = others
        others.by_key.setdefault(key, set()).add(self)

    def end(self) -> None:
        """Nothing is left to stop. Idempotent."""
        self._others.remove(self)


class ActiveRequests:
    """Ids may repeat: a stop request then stops every request of its id."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, str], set[ActiveRequest]] = {}

    def remove(self, request: ActiveRequest) -> None:
        """Idempotent."""
        requests = self.by_key.get(request.key)
        if requests is not None:
            requests.discard(request)
            if not requests:
                del self.by_key[request.key]

    def __len__(self) -> int:
        return sum(map(len, self.by_key.values()))

    def stop(self, tenant: str, client_request_id: str, scope: StreamScope | None) -> None:
        """Stop the requests that a stop request means. None of them is fine: it has ended.

        Raises InvalidRequestError for a stop request without an id that came alone.
        """
        if client_request_id:
            victims = self.by_key.get((tenant, client_request_id), set())
        elif scope is not None:
            victims = {
                request
                for requests in self.by_key.values()
                for request in requests
                if request.scope is scope
            }
        else:
            raise InvalidRequestError(
                "Trying to stop a request but request ID is not provided; send the id of the "
                "request to stop, or send the stop request over the same stream",
                param="id",
            )
        for request in victims:
            request.set()


logger = logging.getLogger(__name__)

MAX_UNREAD_STEPS = 32
"""A client of a stream that left more unread is slow: it gets them in one response."""


class Inference(ResponseStream):
    """One response, or a stream of them. Owns the backend's iterators: it must be closed."""

    def __init__(
        self,
        model: TritonModel,
        request: InferRequest,
        generations: Sequence[TritonGeneration],
        streams: Sequence[AsyncIterator[RequestOutput]],
        active: ActiveRequest,
        recording: Recording,
    ) -> None:
        assert len(generations) == len(streams) > 0
        self._model = model
        self._request = request
        self._streams = streams
        self._outputs = interleaved(streams) if len(streams) > 1 else alone(streams[0])
        self._read = functools.partial(anext, self._outputs, None)
        self._active = active
        self._recording = recording
        self._is_streamed = generations[0].is_streamed
        self._batch = [
            [SequenceSoFar(generation, index) for index in range(generation.num_sequences)]
            for generation in generations
        ]
        self._num_running = len(streams)
        self._ready: deque[InferResponse] = deque()
        """Responses of a stream that have not been read yet."""
        self._is_over = False
        """The last response was made."""
        self._adapters: tuple[ResolvedAdapter, ...] = ()
        self._parameters = model.kind.response_parameters

    async def response(self) -> InferResponse:
        """Return everything in one response. A stopped request returns what it has."""
        with self._recording:
            while self._num_running:
                found = await self._next_output()
                if found is None:
                    self._begin_all()
                    break
                self._take(*found)
            response = await self._response(self._batch, is_final=True)
        self._record_success()
        return response

    async def __anext__(self) -> InferResponse:
        """One response per step and sequence if streamed and read in time, otherwise one per
        sequence.

        The last one is final, whatever happens to the request but an error.
        """
        with self._recording:
            while not self._ready and not self._is_over:
                found = await self._next_output()
                if found is None:
                    await self._end()
                else:
                    for step in self._steps(found[1]):
                        await self._add_pieces(found[0], step)
        if not self._ready:
            raise StopAsyncIteration
        response = self._ready.popleft()
        self._recording.responded(is_empty=not response.outputs)
        if response.is_final:  # its reader may not read again
            self._record_success()
        return response

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        self._recording.failed(None)
        is_cancelled = self._recording.was_cancelled and not self._is_over
        # The vLLM backend's sentences, which its tests look for in the log.
        words = is_cancelled and self._model.kind.dialect is BackendDialect.VLLM
        if words:
            logger.debug("[vllm] Cancelling the request %s", self._request.request_id)
        self._active.end()
        self._is_over = True
        self._ready.clear()
        await self._outputs.aclose()
        for stream in self._streams:
            await close_outputs(stream)
        if words:
            logger.debug("[vllm] Successfully cancelled the request %s", self._request.request_id)

    async def _next_output(self) -> tuple[int, RequestOutput] | None:
        """An element and its next output; None at the end and once the request is stopped."""
        try:
            return await self._active.result_before_stop(self._read)
        except LoraplexError as error:
            raise_in_dialect(self._model, error)

    def _record_success(self) -> None:
        """Queued until the last element of the batch had its first step."""
        times = [_token_times(completions) for completions in self._batch]
        waited = max([each.queue_seconds for each in times])
        self._recording.succeeded(len(times), round(waited * 1e9), times)

    async def _add_pieces(self, index: int, output: RequestOutput) -> None:
        """The responses that an output of one element of the batch brings."""
        groups = self._grouped(self._take(index, output))
        self._is_over = self._num_running == 0 and bool(groups)
        for group in groups:
            is_final = self._is_over and group is groups[-1]
            self._ready.append(await self._piece(index, group, is_final=is_final))

    def _steps(self, output: RequestOutput) -> list[RequestOutput]:
        """Divide an output that a reader found late into one per step, as they were made.

        The output of a slow reader stays whole.
        """
        if not self._is_streamed or len(output.sequences) < 2:
            return [output]
        rounds: list[list[SequenceOutput]] = [[]]
        for sequence in output.sequences:
            if any(sequence.index == other.index for other in rounds[-1]):
                rounds.append([])
            rounds[-1].append(sequence)
        if not 1 < len(rounds) <= MAX_UNREAD_STEPS:
            return [output]
        replace = msgspec.structs.replace
        first, *middle, last = [replace(output, sequences=tuple(each)) for each in rounds]
        return [
            replace(first, finished=False, timing=None),
            *(replace(each, finished=False, timing=None, prompt_logits=()) for each in middle),
            replace(last, prompt_logits=()),
        ]

    async def _end(self) -> None:
        """What is left to send when the outputs end without a last piece: after a stop."""
        self._is_over = True
        self._begin_all()
        left = [
            (index, group)
            for index, completions in enumerate(self._batch)
            for group in self._grouped(
                [completion for completion in completions if not completion.is_sent]
            )
        ]
        left = left or [(0, self._grouped(self._batch[0])[0])]
        for index, group in left:
            self._ready.append(await self._piece(index, group, is_final=group is left[-1][1]))

    @staticmethod
    def _grouped(completions: list[SequenceSoFar]) -> list[list[SequenceSoFar]]:
        """Completions by response: each has its own, but those that come together share one."""
        if completions and completions[0].generation.comes_together:
            return [completions]
        return [[completion] for completion in completions]

    def _take(self, index: int, output: RequestOutput) -> list[SequenceSoFar]:
        """Add an output to its completions; return those to be sent now."""
        self._recording.begun()
        self._num_running -= output.finished
        completions = self._batch[index]
        if output.adapters != self._adapters:
            self._show_adapters(output.adapters)
        for completion in completions:
            completion.begin(output.prompt_token_ids, output.num_encoder_tokens)
            if output.prompt_logits:
                completion.prompt_logits += output.prompt_logits
            completion.pooled = output.pooled
            completion.timing = output.timing
        for sequence in output.sequences:
            completions[sequence.index].add(sequence)
        if self._is_streamed:
            if completions[0].generation.comes_together:
                return completions if output.sequences else []
            # The output of a slow reader: several pieces of one sequence are one response.
            indices = dict.fromkeys([sequence.index for sequence in output.sequences])
            return [completions[index] for index in indices]
        return completions if output.finished else []

    def _show_adapters(self, adapters: tuple[ResolvedAdapter, ...]) -> None:
        """Set the adapters in the parameters of all further responses."""
        self._adapters = adapters
        if adapters:
            names = ",".join(adapter.name for adapter in adapters)
            digests = ",".join(adapter.digest for adapter in adapters)
            self._parameters = {
                **self._parameters,
                "adapter": names,
                "adapter_digest": digests,
            }

    def _begin_all(self) -> None:
        """A request that was stopped before its first output has at least its prompt."""
        for completions in self._batch:
            for completion in completions:
                prompt = completion.generation.request.prompt
                completion.begin(() if isinstance(prompt, str) else prompt)

    async def _piece(
        self, index: int, completions: list[SequenceSoFar], *, is_final: bool
    ) -> InferResponse:
        has_batch = len(self._batch) > 1
        is_one_of_several = len(completions) < len(self._batch[index])
        response = await self._response(
            [completions],
            is_final=is_final,
            batch_index=index if has_batch else None,
            sequence_index=completions[0].index if is_one_of_several else None,
        )
        for completion in completions:
            completion.drain()
        return response

    async def _response(
        self,
        batch: Sequence[Sequence[SequenceSoFar]],
        *,
        is_final: bool,
        batch_index: int | None = None,
        sequence_index: int | None = None,
    ) -> InferResponse:
        start_ns = time.monotonic_ns()
        make = functools.partial(
            output_tensors,
            *(self._model.kind, batch),
            batch_index=batch_index,
            sequence_index=sequence_index,
        )
        tensors = await done(make, sum([a.writing_work for each in batch for a in each]))
        self._recording.made_output(time.monotonic_ns() - start_ns)
        return InferResponse(
            model=self._model.name,
            version=self._model.version,
            request_id=self._request.request_id,
            outputs=select(self._model, tensors, self._request.requested),
            parameters=self._parameters_of(batch),
            is_final=is_final,
        )

    def _parameters_of(self, batch: Sequence[Sequence[SequenceSoFar]]) -> Mapping[str, Parameter]:
        """Parameters with the metrics that have no tensor; the sum over several elements."""
        if not batch[0][0].generation.returns_perf_metrics:
            return self._parameters
        timings = [
            completions[0].timing for completions in batch if completions[0].timing is not None
        ]
        if not timings:
            return self._parameters
        return {
            **self._parameters,
            "num_cached_tokens": sum(timing.num_cached_tokens for timing in timings),
            "num_preemptions": sum(timing.num_preemptions for timing in timings),
            "num_restarts": sum(timing.num_restarts for timing in timings),
            "adapter_load_ns": sum(timing.adapter_load_ns for timing in timings),
            "adapter_copy_ns": sum(timing.adapter_copy_ns for timing in timings),
        }


def _token_times(completions: Sequence[SequenceSoFar]) -> TokenTimes:
    counts = (
        completions[0].num_input_tokens,
        sum([completion.num_output_tokens for completion in completions]),
        len(completions),
    )
    timing = completions[0].timing
    if timing is None:
        return TokenTimes(*counts)
    return TokenTimes(
        *counts,
        timing.first_token_seconds,
        timing.seconds_per_token,
        timing.total_seconds,
        timing.queue_seconds or 0.0,
    )


def select(
    model: TritonModel, tensors: Sequence[Tensor], requested: Sequence[str]
) -> tuple[Tensor, ...]:
    """The outputs that a client gets: those that it names, or all; without a batch dimension if
    the model has none."""
    kept = [tensor for tensor in tensors if tensor.name in requested] if requested else tensors
    return tuple(kept if model.max_batch_size else without_batch(model.kind, kept))


async def alone(stream: AsyncIterator[T]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield what `interleaved` yields of one stream, without a task for each item."""
    async for item in stream:
        yield 0, item


def raise_in_dialect(model: TritonModel, error: LoraplexError) -> NoReturn:
    """Raise the error; one of the vLLM backend's requests becomes a response with a text."""
    if model.kind.dialect is not BackendDialect.VLLM:
        raise error
    raise vllm_failure(error) from error
