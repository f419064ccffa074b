"""Inference requests of both wires: admission, answers, stop requests, statistics.

Everything here runs on the event loop of the Backend. It knows no JSON, no HTTP and no protobuf.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from loraplex.core.adapter import AdapterChoice, AdapterKey, ByTaskId
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidParameterError,
    InvalidRequestError,
    LoraplexError,
)
from loraplex.core.output import RequestOutput
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve.active import ActiveRequest, ActiveRequests, StreamScope
from loraplex.frontends.kserve.inference import Inference
from loraplex.frontends.kserve.messages import InferRequest, InferResponse
from loraplex.frontends.kserve.models.catalog import (
    DEFAULT_MAX_BATCH_SIZE,
    VERSION,
    Catalog,
    TritonModel,
)
from loraplex.frontends.kserve.models.convert import Generation, InlineAdapter, convert
from loraplex.frontends.kserve.models.inputs import Inputs, check_requested, read_inputs
from loraplex.frontends.kserve.statistics import Statistics
from loraplex.serving.backend import Backend, close_outputs

MICROSECONDS = 1_000_000
MAX_PRIORITY_LEVEL = 2**31 - 1
DEFAULT_PRIORITY_LEVEL = 100
"""Level 99 comes before what says nothing, level 101 after it."""


class TritonService:
    """What a Triton server does, over one Backend."""

    def __init__(self, backend: Backend, *, max_batch_size: int = DEFAULT_MAX_BATCH_SIZE) -> None:
        self.backend = backend
        self.catalog = Catalog(backend, max_batch_size=max_batch_size)
        self._active = ActiveRequests()
        self._statistics = Statistics()

    @property
    def num_active(self) -> int:
        """Inference requests in work."""
        return len(self._active)

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Of one model, or of all. Raises ModelNotFoundError."""
        models = [self.catalog.find(name, version)] if name else self.catalog.models()
        return [self._statistics.report(model.name, VERSION) for model in models]

    async def infer(
        self, request: InferRequest, principal: Principal, scope: StreamScope | None = None
    ) -> InferResponse:
        """The one answer to a request. Raises errors of core.errors. Cancelling it aborts."""
        model = self.catalog.find(request.model, request.version)
        with _Timed(self._statistics, model.name) as timed:
            elements = self._read(model, request)
            if _is_stop(elements):
                return self._stop(model, request, principal, scope)
            if elements[0].flag("is_streamed"):
                raise InvalidRequestError(
                    "Streaming is only supported over generate_stream and ModelStreamInfer; "
                    f"send '{model.kind.input_of('is_streamed')}' false to get one answer",
                    param=model.kind.input_of("is_streamed"),
                )
            inference, active = await self._admit(model, request, elements, principal, scope)
            try:
                response = await inference.answer()
            finally:
                self._active.remove(active)
                await inference.aclose()
            timed.batch_size = len(elements)
            return response

    async def stream(
        self, request: InferRequest, principal: Principal, scope: StreamScope | None = None
    ) -> "ResponseStream":
        """Admit a request; its answers follow. What is wrong beforehand is raised here."""
        model = self.catalog.find(request.model, request.version)
        with _Timed(self._statistics, model.name, is_whole=False):
            elements = self._read(model, request)
            if _is_stop(elements):
                return ResponseStream(_one(self._stop(model, request, principal, scope)))
            inference, active = await self._admit(model, request, elements, principal, scope)
        return ResponseStream(
            self._timed_responses(model, inference, len(elements)),
            inference,
            (self._active, active),
        )

    def _read(self, model: TritonModel, request: InferRequest) -> list[Inputs]:
        check_requested(model.kind, model.name, request.requested)
        return read_inputs(
            model.kind, model.name, request.inputs, max_batch_size=model.max_batch_size
        )

    def _stop(
        self,
        model: TritonModel,
        request: InferRequest,
        principal: Principal,
        scope: StreamScope | None,
    ) -> InferResponse:
        """Serve a stop request: its own answer is empty."""
        self._active.stop(principal.tenant, request.request_id, scope)
        return InferResponse(model=model.name, version=VERSION, request_id=request.request_id)

    async def _admit(
        self,
        model: TritonModel,
        request: InferRequest,
        elements: Sequence[Inputs],
        principal: Principal,
        scope: StreamScope | None,
    ) -> tuple[Inference, ActiveRequest]:
        """All elements of the batch or, if one is refused, none."""
        generations = [self._convert(model, request, inputs) for inputs in elements]
        streams: list[AsyncIterator[RequestOutput]] = []
        active = ActiveRequest(principal.tenant, request.request_id, scope)
        self._active.add(active)  # before any await: a stop request may be close behind
        try:
            for generation in generations:
                streams.append(await self._generate(generation, principal))
        except BaseException:
            self._active.remove(active)
            for stream in streams:
                await close_outputs(stream)
            raise
        return Inference(model, request, generations, streams, active), active

    def _convert(self, model: TritonModel, request: InferRequest, inputs: Inputs) -> Generation:
        timeout = request.parameters.get("timeout")
        has_timeout = isinstance(timeout, int) and timeout > 0
        return convert(
            inputs,
            model.card,
            self.backend.new_request_id(),
            client_request_id=request.request_id,
            adapters=request.parameters.get("adapters", ""),
            timeout_seconds=int(timeout or 0) / MICROSECONDS if has_timeout else None,
            priority=_priority(request),
            tokenize=lambda text: self.backend.tokenize(
                model.card.name, text, add_special_tokens=False
            ),
        )

    async def _generate(
        self, generation: Generation, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        request = generation.request
        if generation.inline_adapter is not None:
            key = await self._add(generation.inline_adapter, request.model, principal)
            request = msgspec.structs.replace(request, adapters=(AdapterChoice(key),))
        try:
            return await self.backend.generate(request, principal)
        except AdapterNotFoundError as error:
            raise _in_tensorrt_words(error, request) from None

    async def _add(self, adapter: InlineAdapter, model: str, principal: Principal) -> AdapterKey:
        """Right before the request is admitted, so that no other adapter takes its key between."""
        return await self.backend.add_adapter_tensors(
            principal,
            model=model,
            task_id=adapter.task_id,
            weights=adapter.weights,
            config=adapter.config,
        )

    async def _timed_responses(
        self, model: TritonModel, inference: Inference, batch_size: int
    ) -> AsyncGenerator[InferResponse, None]:
        with _Timed(self._statistics, model.name) as timed:
            async with aclosing(inference.responses()) as responses:
                async for response in responses:
                    yield response
            timed.batch_size = batch_size


class ResponseStream(AsyncIterator[InferResponse]):
    """The answers to one request. Close it: that aborts the request if it still runs."""

    def __init__(
        self,
        responses: AsyncGenerator[InferResponse, None],
        inference: Inference | None = None,
        active: tuple[ActiveRequests, ActiveRequest] | None = None,
    ) -> None:
        self._responses = responses
        self._inference = inference
        self._active = active

    async def __anext__(self) -> InferResponse:
        return await anext(self._responses)

    async def aclose(self) -> None:
        """Idempotent. A generator that never ran has no `finally`: so all is undone here."""
        if self._active is not None:
            registry, active = self._active
            registry.remove(active)
        await self._responses.aclose()
        if self._inference is not None:
            await self._inference.aclose()


class _Timed:
    """Records a request as it ends: an error is a failure, a cancelled request is neither."""

    def __init__(self, statistics: Statistics, model: str, *, is_whole: bool = True) -> None:
        self.batch_size = 0
        """Elements answered; set before the end. 0: there is nothing to count."""
        self._statistics = statistics
        self._model = model
        self._is_whole = is_whole
        self._start_ns = time.monotonic_ns()

    def __enter__(self) -> "_Timed":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        duration_ns = time.monotonic_ns() - self._start_ns
        if isinstance(error, Exception):
            self._statistics.record_failure(self._model, duration_ns)
        elif error is None and self._is_whole and self.batch_size:
            self._statistics.record_success(self._model, self.batch_size, duration_ns)


def _priority(request: InferRequest) -> int:
    """Of Triton's request parameter: 1 is the highest level, 0 the default one."""
    level = request.parameters.get("priority", 0)
    if type(level) is not int or not 0 <= level <= MAX_PRIORITY_LEVEL:
        raise InvalidParameterError(
            f"the parameter 'priority' must be an integer in [0, {MAX_PRIORITY_LEVEL}], got "
            f"{level!r}",
            param="priority",
        )
    return level - DEFAULT_PRIORITY_LEVEL if level else 0


def _is_stop(elements: Sequence[Inputs]) -> bool:
    return bool(elements) and elements[0].flag("stop")


async def _one(response: InferResponse) -> AsyncGenerator[InferResponse, None]:
    yield response


def _in_tensorrt_words(error: AdapterNotFoundError, request: GenerateRequest) -> LoraplexError:
    """Clients of TensorRT-LLM look for this sentence to know that an adapter is not there."""
    match request.adapters:
        case (AdapterChoice(key=ByTaskId(task_id=task_id)),):
            pass
        case _:
            return error
    sentence = f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
    message = error.message if sentence in error.message else f"{sentence} ({error.message})"
    return AdapterNotFoundError(message, param="lora_task_id")
