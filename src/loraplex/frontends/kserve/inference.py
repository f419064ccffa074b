"""One admitted inference request: the answers of all elements of its batch, unary or as a stream.

Owns the backend's iterators and closes them; whoever holds an Inference must close it.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from loraplex.core.output import RequestOutput
from loraplex.frontends.kserve.active import ActiveRequest
from loraplex.frontends.kserve.merge import merged
from loraplex.frontends.kserve.messages import InferRequest, InferResponse, Parameter
from loraplex.frontends.kserve.models.answer import Answer
from loraplex.frontends.kserve.models.answers import output_tensors, without_batch
from loraplex.frontends.kserve.models.convert import Generation
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.statistics import Recording
from loraplex.frontends.kserve.tensors import Tensor
from loraplex.frontends.kserve.token_metrics import TokenTimes
from loraplex.serving.backend import close_outputs


class Inference:
    def __init__(
        self,
        model: TritonModel,
        request: InferRequest,
        generations: Sequence[Generation],
        streams: Sequence[AsyncIterator[RequestOutput]],
        active: ActiveRequest,
        recording: Recording,
    ) -> None:
        assert len(generations) == len(streams) > 0
        self._model = model
        self._request = request
        self._streams = streams
        self._active = active
        self._recording = recording
        self._is_streamed = generations[0].is_streamed
        self._batch = [
            [Answer(generation, index) for index in range(generation.request.sampling.n)]
            for generation in generations
        ]
        self._parameters: dict[str, Parameter] = dict(model.kind.response_parameters)

    async def answer(self) -> InferResponse:
        """Everything in one response. A stopped request answers with what it has."""
        async with aclosing(merged(self._streams, self._active.stopped)) as outputs:
            async for index, output in outputs:
                self._take(index, output)
        self._begin_all()
        return self._response(self._batch, is_final=True)

    async def responses(self) -> AsyncGenerator[InferResponse, None]:
        """One response per step and sequence if streamed, otherwise one per sequence.

        The last one is final, whatever happens to the request but an error.
        """
        num_running = len(self._batch)
        async with aclosing(merged(self._streams, self._active.stopped)) as outputs:
            async for index, output in outputs:
                ready = self._grouped(self._take(index, output))
                num_running -= output.finished
                for group in ready:
                    is_final = num_running == 0 and group is ready[-1]
                    yield self._piece(index, group, is_final=is_final)
                if num_running == 0 and ready:
                    return
        for response in self._rest():
            yield response

    @property
    def queue_ns(self) -> int:
        """How long the last element of the batch waited for its first step, once it has ended."""
        timings = [answers[0].timing for answers in self._batch]
        waits = [timing.queue_seconds or 0.0 for timing in timings if timing is not None]
        return round(max(waits, default=0.0) * 1e9)

    def token_times(self) -> list[TokenTimes]:
        """Of every element of the batch, once all have ended."""
        return [_token_times(answers) for answers in self._batch]

    @staticmethod
    def _grouped(answers: list[Answer]) -> list[list[Answer]]:
        """By response: each sequence has its own, but those that come together share one."""
        if answers and answers[0].generation.comes_together:
            return [answers]
        return [[answer] for answer in answers]

    def _rest(self) -> list[InferResponse]:
        """What is left to send when the outputs end without a last piece: after a stop."""
        self._begin_all()
        left = [
            (index, group)
            for index, answers in enumerate(self._batch)
            for group in self._grouped([answer for answer in answers if not answer.is_sent])
        ]
        left = left or [(0, self._grouped(self._batch[0])[0])]
        return [self._piece(i, group, is_final=group is left[-1][1]) for i, group in left]

    async def aclose(self) -> None:
        """Abort what still runs."""
        for stream in self._streams:
            await close_outputs(stream)

    def _take(self, index: int, output: RequestOutput) -> list[Answer]:
        """Add an output to its answers; the answers that are to be sent now."""
        self._recording.begun()
        answers = self._batch[index]
        if output.adapters:
            names = ",".join(adapter.name for adapter in output.adapters)
            digests = ",".join(adapter.digest for adapter in output.adapters)
            self._parameters |= {"adapter": names, "adapter_digest": digests}
        for answer in answers:
            answer.begin(output.prompt_token_ids)
            answer.prompt_logits += output.prompt_logits
            answer.timing = output.timing
        for sequence in output.sequences:
            answers[sequence.index].add(sequence)
        if self._is_streamed:
            if answers[0].generation.comes_together:
                return answers if output.sequences else []
            # What a slow reader left is merged: several pieces of one sequence are one response.
            indices = dict.fromkeys(sequence.index for sequence in output.sequences)
            return [answers[index] for index in indices]
        return answers if output.finished else []

    def _begin_all(self) -> None:
        """A request that was stopped before its first output has at least its prompt."""
        for answers in self._batch:
            for answer in answers:
                prompt = answer.generation.request.prompt
                answer.begin(() if isinstance(prompt, str) else prompt)

    def _piece(self, index: int, answers: list[Answer], *, is_final: bool) -> InferResponse:
        has_batch = len(self._batch) > 1
        is_one_of_several = len(answers) < len(self._batch[index])
        response = self._response(
            [answers],
            is_final=is_final,
            batch_index=index if has_batch else None,
            sequence_index=answers[0].index if is_one_of_several else None,
        )
        for answer in answers:
            answer.drain()
        return response

    def _response(
        self,
        batch: Sequence[Sequence[Answer]],
        *,
        is_final: bool,
        batch_index: int | None = None,
        sequence_index: int | None = None,
    ) -> InferResponse:
        start_ns = time.monotonic_ns()
        tensors = output_tensors(
            self._model.kind, batch, batch_index=batch_index, sequence_index=sequence_index
        )
        self._recording.made_output(time.monotonic_ns() - start_ns)
        return InferResponse(
            model=self._model.name,
            version=self._model.version,
            request_id=self._request.request_id,
            outputs=select(self._model, tensors, self._request.requested),
            parameters=dict(self._parameters) | _measured(batch),
            is_final=is_final,
        )


def _token_times(answers: Sequence[Answer]) -> TokenTimes:
    timing = answers[0].timing
    return TokenTimes(
        num_prompt_tokens=answers[0].num_input_tokens,
        num_output_tokens=sum(answer.num_output_tokens for answer in answers),
        num_sequences=len(answers),
        first_token_seconds=timing.first_token_seconds if timing else None,
        seconds_per_token=timing.seconds_per_token if timing else None,
        total_seconds=timing.total_seconds if timing else None,
    )


def select(
    model: TritonModel, tensors: Sequence[Tensor], requested: Sequence[str]
) -> tuple[Tensor, ...]:
    """The outputs that a client gets: those that it names, or all; without a batch dimension if
    the model has none."""
    kept = [tensor for tensor in tensors if not requested or tensor.name in requested]
    return tuple(kept if model.max_batch_size else without_batch(model.kind, kept))


def _measured(batch: Sequence[Sequence[Answer]]) -> dict[str, Parameter]:
    """What return_perf_metrics has no tensor for; of several elements the sum."""
    timings = [answers[0].timing for answers in batch if answers[0].timing is not None]
    if not batch[0][0].generation.returns_perf_metrics or not timings:
        return {}
    return {
        "num_cached_tokens": sum(timing.num_cached_tokens for timing in timings),
        "num_preemptions": sum(timing.num_preemptions for timing in timings),
        "num_restarts": sum(timing.num_restarts for timing in timings),
        "adapter_load_ns": sum(timing.adapter_load_ns for timing in timings),
        "adapter_copy_ns": sum(timing.adapter_copy_ns for timing in timings),
    }
