"""Inference requests of HTTP and gRPC: conversion, admission, responses, stop requests, statistics.

Everything here runs on the event loop of the Backend. It knows no JSON, no HTTP and no protobuf.
"""

import contextlib
import functools
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from loraplex.core.adapter import AdapterChoice
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidParameterError,
    InvalidRequestError,
    InvalidTensorError,
    LoraplexError,
    NotReadyError,
    UnsupportedFeatureError,
)
from loraplex.core.metrics_config import MetricsConfig
from loraplex.core.output import RequestOutput
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.kserve.errors import (
    FailedResponse,
    in_tensorrt_words,
    unknown_lora,
)
from loraplex.frontends.kserve.inference import (
    ActiveRequest,
    ActiveRequests,
    Inference,
    StreamScope,
    raise_in_dialect,
    select,
)
from loraplex.frontends.kserve.management import Management
from loraplex.frontends.kserve.messages import (
    REQUEST_TYPE,
    InferRequest,
    InferResponse,
    OneResponse,
    ResponseStream,
)
from loraplex.frontends.kserve.metrics import (
    inference_collector,
    tensorrt_llm_collector,
    token_labels,
)
from loraplex.frontends.kserve.models.catalog import DEFAULT_MAX_BATCH_SIZE, Catalog, StartModel
from loraplex.frontends.kserve.models.computations import COMPUTATIONS, compute
from loraplex.frontends.kserve.models.convert import (
    InlineAdapter,
    RequestHead,
    TritonGeneration,
    convert,
)
from loraplex.frontends.kserve.models.inputs import Inputs, check_requested, read_inputs
from loraplex.frontends.kserve.models.kinds import BLS, ENSEMBLE, TENSORRT_LLM, BackendDialect
from loraplex.frontends.kserve.models.model_control import ModelControl
from loraplex.frontends.kserve.models.pooled import (
    check_not_pooled,
    convert_pooled,
    is_pooled,
    pooled_output,
)
from loraplex.frontends.kserve.models.triton_model import (
    ModelDeclaration,
    ModelOptions,
    TritonModel,
)
from loraplex.frontends.kserve.models.vllm import convert_vllm
from loraplex.frontends.kserve.shared_memory import SharedMemory
from loraplex.frontends.kserve.statistics import (
    ModelCounts,
    Recording,
    Statistics,
    StepCounts,
    TokenLabels,
    first_response_buckets,
)
from loraplex.frontends.kserve.tensors import Tensor
from loraplex.serving.backend import Backend, admit_all

_ONE_PER_ELEMENT = (ENSEMBLE.name, TENSORRT_LLM.name)
"""Kinds that respond to each element of a batch by itself."""


class TritonService:
    """What a Triton server does, over one Backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        declarations: Sequence[ModelDeclaration] = (),
        control: ModelControl | None = None,
        sends_traces: bool = False,
        metrics: MetricsConfig | None = None,
        start_model: StartModel | None = None,
    ) -> None:
        """declarations: those of a model repository; none: our default names. control: which
        models are loaded, and whether clients may change that; None: all, and they may not.
        sends_traces: the server sends its requests' traces to a collector. metrics: which families
        there are; None: Triton's default ones. start_model: starts the base model of a model that
        is loaded later. Raises ConfigError for model_metrics.
        """
        self.backend = backend
        self.catalog = Catalog(
            backend,
            max_batch_size=max_batch_size,
            declarations=declarations,
            control=control,
            start_model=start_model,
        )
        self.memory = SharedMemory()
        self.management = Management(self.catalog, sends_traces=sends_traces)
        self._active = ActiveRequests()
        self._labels: dict[str, tuple[TritonModel, ModelCounts, TokenLabels, StepCounts]] = {}
        """Where requests to a model of the catalog count, and for what."""
        self._metrics = metrics or MetricsConfig()
        buckets = {one.name: first_response_buckets(one.name, one.config) for one in declarations}
        self.counts = Statistics(
            keeps_latencies=self._metrics.keeps_latencies,
            first_response_buckets={name: own for name, own in buckets.items() if own is not None},
        )

    @property
    def num_active(self) -> int:
        """Number of in-flight inference requests."""
        return len(self._active)

    def statistics(
        self, name: str = "", version: str = "", principal: Principal = LOCAL
    ) -> list[dict[str, Any]]:
        """Statistics of one model or of all. Raises ModelNotFoundError, PermissionDeniedError."""
        principal.require_operator("see the server's statistics")
        models = [self.catalog.find(name, version)] if name else self.catalog.models()
        return [self.counts.report(model.name, model.version) for model in models]

    async def infer(
        self, request: InferRequest, principal: Principal, scope: StreamScope | None = None
    ) -> InferResponse:
        """Return the one response to a request. Raises errors of core.errors. Cancelling aborts."""
        result = await self._execute(request, principal, scope, takes_stream=False)
        if isinstance(result, InferResponse):
            return result
        try:
            return await result.response()
        finally:
            await result.aclose()

    async def stream(
        self, request: InferRequest, principal: Principal, scope: StreamScope | None = None
    ) -> ResponseStream:
        """Admit a request; its responses follow. Errors found on admission are raised here."""
        result = await self._execute(request, principal, scope, takes_stream=True)
        return OneResponse(result) if isinstance(result, InferResponse) else result

    async def _execute(
        self,
        request: InferRequest,
        principal: Principal,
        scope: StreamScope | None,
        *,
        takes_stream: bool,
    ) -> InferResponse | Inference:
        """Read a request by its model's table; stop, compute or admit."""
        model = self.catalog.find(request.model, request.version, principal)
        with self._recorded(model) as recording:
            if request.requested:
                check_requested(model.kind, model.name, request.requested)
            elements = read_inputs(
                *(model.kind, model.name, request.inputs),
                max_batch_size=model.max_batch_size,
                is_pooled=bool(request.requested) and is_pooled(request.requested),
            )
            _check_num_responses(model, elements)
            if elements and elements[0].first("stop"):
                recording.uncounted()
                self._active.stop(principal.tenant, request.request_id, scope)
                return _response(model, request, ())
            recording.read()
            if model.kind.name in COMPUTATIONS:
                num_bytes = sum(tensor.num_bytes for tensor in request.inputs)
                tensors = await compute(model, elements, num_bytes)
                response = _response(model, request, select(model, tensors, request.requested))
                recording.succeeded(len(elements))
                return response
            if elements[0].first("is_streamed") and not takes_stream:
                raise InvalidRequestError(
                    "Streaming is only supported over generate_stream and ModelStreamInfer; "
                    f"send '{model.kind.input_of('is_streamed')}' false to get one response",
                    param=model.kind.input_of("is_streamed"),
                )
            return await self._admit(model, request, elements, principal, scope, recording)

    def _recorded(self, model: TritonModel) -> Recording:
        known = self._labels.get(model.name)
        if known is None or known[0] is not model:  # the catalog has changed
            known = self._labels[model.name] = (
                model,
                self.counts.of(model.name),
                token_labels(self.catalog, model),
                self.counts.steps(self.catalog.steps(model)),
            )
        return Recording(self.counts.token_metrics, *known[1:])

    def collectors(self) -> list[Collector]:
        """Metric families of Triton and its backends, for GET /metrics."""
        for model in self.catalog.models():
            self.counts.token_metrics.expect(token_labels(self.catalog, model))
        return [
            inference_collector(self.catalog, self.counts, self._metrics),
            tensorrt_llm_collector(self.catalog, self.backend),
            self.counts.token_metrics,
        ]

    async def _admit(
        self,
        model: TritonModel,
        request: InferRequest,
        elements: Sequence[Inputs],
        principal: Principal,
        scope: StreamScope | None,
        recording: Recording,
    ) -> Inference:
        """All elements of the batch or, if one is refused, none."""
        # Before any await: a stop request may follow at once.
        active = ActiveRequest(self._active, (principal.tenant, request.request_id), scope)
        try:
            generations = [converted(self.backend, model, request, each) for each in elements]
            inline = {one.request.request_id: one.inline_adapter for one in generations}
            async with contextlib.AsyncExitStack() as stack:
                streams = await admit_all(
                    functools.partial(generate, self.backend, model, principal, inline),
                    [generation.request for generation in generations],
                    stack,
                )
                stack.pop_all()  # the inference closes them
        except BaseException as error:
            active.end()
            if isinstance(error, LoraplexError):
                raise_in_dialect(model, error)
            raise
        return Inference(model, request, generations, streams, active, recording)


def _check_num_responses(model: TritonModel, elements: Sequence[Inputs]) -> None:
    """Raise InvalidRequestError for what would need several responses from a model that gives one,
    or more beams than its configuration allows. The first words are the original's.
    """
    is_unary = model.is_decoupled is False
    if is_unary and any(inputs.first("is_streamed") for inputs in elements):
        field = model.kind.input_of("is_streamed")
        raise InvalidRequestError(
            "Streaming is only supported if model is deployed using decoupled mode. Send "
            f"'{field}' false, or set decoupled in the config.pbtxt of '{model.name}'",
            param=field,
        )
    if is_unary and len(elements) > 1 and model.kind.name in _ONE_PER_ELEMENT:
        raise InvalidRequestError(
            "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction "
            f"policy: send one element, or set decoupled in the config.pbtxt of '{model.name}'"
        )
    most = model.options.max_beam_width
    if most is not None and any(inputs.first("beam_width", 1) > most for inputs in elements):
        raise InvalidRequestError(
            f"'beam_width' must be at most {most}, the max_beam_width of model '{model.name}'",
            param="beam_width",
        )


def _response(
    model: TritonModel, request: InferRequest, outputs: tuple[Tensor, ...]
) -> InferResponse:
    """The only response to a request; that of a stop request is empty."""
    return InferResponse(
        model=model.name, version=model.version, request_id=request.request_id, outputs=outputs
    )


MICROSECONDS = 1_000_000
MAX_TIMEOUT = 2**63 - 1
"""Microseconds: what fits into the parameter of the protocol."""
_DIGITS = re.compile("[0-9]{1,19}")
"""Digits of up to the longest timeout."""
MAX_PRIORITY_LEVEL = 2**31 - 1
DEFAULT_PRIORITY_LEVEL = 100
"""Level of a request without one: 99 comes before it, 101 after it."""

_NAMED = ("max_tokens", "min_tokens")
"""Parameters that an admission names, and that an input may have under another name."""
_WHOLE_REQUEST = "context_and_generation"
"""The request type that is not one half of disaggregated serving."""


def converted(
    backend: Backend, model: TritonModel, request: InferRequest, inputs: Inputs
) -> TritonGeneration:
    """Convert to a request for the backend. Raises RequestErrors and FailedResponse."""
    parameters = request.parameters
    head = RequestHead(
        request_id=backend.new_request_id(),
        model=model.card.name,
        client_request_id=request.request_id,
        timeout_seconds=_timeout_seconds(request) if parameters else None,
        priority=_priority(request) if parameters else 0,
        logit_bytes=request.logit_bytes,
    )
    is_vllm = model.kind.dialect is BackendDialect.VLLM
    if is_vllm and model.options.checks_health and not backend.model_ready(head.model):
        raise NotReadyError("Model is unavailable due to unhealthy vLLM engine")
    if (request.requested or is_vllm) and (output := pooled_output(inputs, request.requested)):
        return convert_pooled(inputs, model, head, parameters, output)
    if parameters:
        check_not_pooled(parameters)
    if is_vllm:
        return convert_vllm(inputs, model, head, parameters)
    if model.kind.name == BLS.name:
        _check_bls(inputs, model.options)
    if parameters:
        _check_request_type(request)
    return convert(inputs, model, head, parameters)


async def generate(
    backend: Backend,
    model: TritonModel,
    principal: Principal,
    inline: Mapping[RequestId, InlineAdapter | None],
    request: GenerateRequest,
) -> AsyncIterator[RequestOutput]:
    """Admit a request. Raises as Backend.generate, in the words of the model's dialect.

    inline: adapters that came with requests. One is added right before its request is admitted, so
    that no other adapter takes its key between.
    """
    adapter = inline[request.request_id]
    if adapter is not None:
        key = await backend.adapter_admin.load_tensors(
            principal,
            model=request.model,
            task_id=adapter.task_id,
            weights=adapter.weights,
            config=adapter.config,
        )
        request = msgspec.structs.replace(request, adapters=(AdapterChoice(key),))
    try:
        return await backend.generate(request, principal)
    except LoraplexError as error:
        named = as_sent(error, {name: model.kind.input_of(name) for name in _NAMED})
        raise _in_words(backend, model, named, request, principal) from None


def _in_words(
    backend: Backend,
    model: TritonModel,
    error: LoraplexError,
    request: GenerateRequest,
    principal: Principal,
) -> LoraplexError | FailedResponse:
    if model.kind.dialect is BackendDialect.VLLM:
        if not isinstance(error, AdapterNotFoundError):
            return error
        cards = backend.adapters(principal, model.card.name)
        return unknown_lora(error, request, [card.name for card in cards])

    def num_prompt_tokens() -> int:
        prompt = request.prompt
        adds = request.add_special_tokens
        if isinstance(prompt, str):
            prompt = tuple(model.texts.encode(prompt, add_special_tokens=adds))
        return len(prompt)

    return in_tensorrt_words(error, request, num_prompt_tokens, model.card.max_model_len - 1)


def _check_bls(inputs: Inputs, options: ModelOptions) -> None:
    """Raise InvalidTensorError, in the words of the original, for what its program refuses."""
    if not "".join(inputs.texts("text_input")):
        raise InvalidTensorError(
            "text_input is required: it must hold at least one character", param="text_input"
        )
    max_tokens = inputs.first("max_tokens", 0)
    if max_tokens <= 0:
        raise InvalidTensorError(
            f"max_tokens must be a single value > 0, got {max_tokens}", param="max_tokens"
        )
    if inputs.first("num_draft_tokens", 0) > 0 and not options.has_draft_model:
        raise InvalidTensorError(
            "cannot perform speculative decoding without draft model: leave num_draft_tokens out, "
            "or set tensorrt_llm_draft_model_name in the config.pbtxt",
            param="num_draft_tokens",
        )


def _timeout_seconds(request: InferRequest) -> float | None:
    """Timeout from a number of microseconds, possibly written as text; None for 0 or none."""
    said = request.parameters.get("timeout", 0)
    timeout = int(said) if isinstance(said, str) and _DIGITS.fullmatch(said) else said
    if type(timeout) is not int or not 0 <= timeout <= MAX_TIMEOUT:
        raise InvalidParameterError(
            f"the parameter 'timeout' must be an integer of microseconds in [0, {MAX_TIMEOUT}], "
            f"got {repr(said)[:40]}",
            param="timeout",
        )
    return timeout / MICROSECONDS if timeout else None


def _priority(request: InferRequest) -> int:
    """Priority of Triton's request parameter: 1 is the highest level, 0 the default one."""
    level = request.parameters.get("priority", 0)
    if type(level) is not int or not 0 <= level <= MAX_PRIORITY_LEVEL:
        raise InvalidParameterError(
            f"the parameter 'priority' must be an integer in [0, {MAX_PRIORITY_LEVEL}], got "
            f"{level!r}",
            param="priority",
        )
    return level - DEFAULT_PRIORITY_LEVEL if level else 0


def _check_request_type(request: InferRequest) -> None:
    kind = request.parameters.get(REQUEST_TYPE, _WHOLE_REQUEST)
    if kind != _WHOLE_REQUEST:
        raise UnsupportedFeatureError(
            f"the parameter '{REQUEST_TYPE}' is {kind!r}, which requests disaggregated serving; "
            f"only {_WHOLE_REQUEST!r} is served",
            param=REQUEST_TYPE,
        )
