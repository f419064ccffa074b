"""One admitted inference request: the answers of all elements of its batch, unary or as a stream.

Owns the backend's iterators and closes them; whoever holds an Inference must close it.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from loraplex.core.output import RequestOutput
from loraplex.frontends.kserve.active import ActiveRequest
from loraplex.frontends.kserve.merge import merged
from loraplex.frontends.kserve.messages import InferRequest, InferResponse, Parameter
from loraplex.frontends.kserve.models.answers import Answer, output_tensors
from loraplex.frontends.kserve.models.catalog import VERSION, TritonModel
from loraplex.frontends.kserve.models.convert import Generation
from loraplex.serving.backend import close_outputs


class Inference:
    def __init__(
        self,
        model: TritonModel,
        request: InferRequest,
        generations: Sequence[Generation],
        streams: Sequence[AsyncIterator[RequestOutput]],
        active: ActiveRequest,
    ) -> None:
        assert len(generations) == len(streams) > 0
        self._model = model
        self._request = request
        self._streams = streams
        self._active = active
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
                ready = self._take(index, output)
                num_running -= output.finished
                for answer in ready:
                    is_final = num_running == 0 and answer is ready[-1]
                    yield self._piece(index, answer, is_final=is_final)
                if num_running == 0 and ready:
                    return
        for response in self._rest():
            yield response

    def _rest(self) -> list[InferResponse]:
        """What is left to send when the outputs end without a last piece: after a stop."""
        self._begin_all()
        left = [(i, a) for i, answers in enumerate(self._batch) for a in answers if not a.is_sent]
        left = left or [(0, self._batch[0][0])]
        return [self._piece(i, answer, is_final=answer is left[-1][1]) for i, answer in left]

    async def aclose(self) -> None:
        """Abort what still runs."""
        for stream in self._streams:
            await close_outputs(stream)

    def _take(self, index: int, output: RequestOutput) -> list[Answer]:
        """Add an output to its answers; the answers that are to be sent now."""
        answers = self._batch[index]
        if output.adapters:
            names = ",".join(adapter.name for adapter in output.adapters)
            digests = ",".join(adapter.digest for adapter in output.adapters)
            self._parameters |= {"adapter": names, "adapter_digest": digests}
        for answer in answers:
            answer.begin(output.prompt_token_ids)
        for sequence in output.sequences:
            answers[sequence.index].add(sequence)
        if self._is_streamed:
            return [answers[sequence.index] for sequence in output.sequences]
        return answers if output.finished else []

    def _begin_all(self) -> None:
        """A request that was stopped before its first output has at least its prompt."""
        for answers in self._batch:
            for answer in answers:
                prompt = answer.generation.request.prompt
                answer.begin(() if isinstance(prompt, str) else prompt)

    def _piece(self, index: int, answer: Answer, *, is_final: bool) -> InferResponse:
        has_batch = len(self._batch) > 1
        has_sequences = len(self._batch[index]) > 1
        response = self._response(
            [[answer]],
            is_final=is_final,
            batch_index=index if has_batch else None,
            sequence_index=answer.index if has_sequences else None,
        )
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
        tensors = output_tensors(
            self._model.kind, batch, batch_index=batch_index, sequence_index=sequence_index
        )
        requested = self._request.requested
        return InferResponse(
            model=self._model.name,
            version=VERSION,
            request_id=self._request.request_id,
            outputs=tuple(t for t in tensors if not requested or t.name in requested),
            parameters=dict(self._parameters),
            is_final=is_final,
        )
