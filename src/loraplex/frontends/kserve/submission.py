"""Conversion of one element of an inference request to the backend's outputs."""

from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import msgspec

from loraplex.core.adapter import AdapterChoice
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidParameterError,
    InvalidTensorError,
    LoraplexError,
    NotReadyError,
    UnsupportedFeatureError,
)
from loraplex.core.output import RequestOutput
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.kserve.errors import (
    FailedResponse,
    in_tensorrt_words,
    unknown_lora,
    vllm_failure,
)
from loraplex.frontends.kserve.messages import REQUEST_TYPE, InferRequest
from loraplex.frontends.kserve.models.convert import (
    InlineAdapter,
    RequestHead,
    TritonGeneration,
    convert,
)
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import BLS, BackendDialect
from loraplex.frontends.kserve.models.triton_model import ModelOptions, TritonModel
from loraplex.frontends.kserve.models.vllm import convert_vllm
from loraplex.serving.backend import Backend

MICROSECONDS = 1_000_000
MAX_TIMEOUT = 2**63 - 1
"""Microseconds: what fits into the parameter of the protocol."""
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
    if model.kind.dialect is BackendDialect.VLLM:
        if model.options.checks_health and not backend.model_ready(head.model):
            raise NotReadyError("Model is unavailable due to unhealthy vLLM engine")
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


def raise_in_dialect(model: TritonModel, error: LoraplexError) -> NoReturn:
    """Raise the error; one of the vLLM backend's requests becomes a response with a text."""
    if model.kind.dialect is not BackendDialect.VLLM:
        raise error
    raise vllm_failure(error) from error


def _timeout_seconds(request: InferRequest) -> float | None:
    """Timeout from a number of microseconds, possibly written as text; None for 0 or none."""
    said = request.parameters.get("timeout", 0)
    timeout = _number_in(said) if isinstance(said, str) else said
    if type(timeout) is not int or not 0 <= timeout <= MAX_TIMEOUT:
        raise InvalidParameterError(
            f"the parameter 'timeout' must be an integer of microseconds in [0, {MAX_TIMEOUT}], "
            f"got {repr(said)[:40]}",
            param="timeout",
        )
    return timeout / MICROSECONDS if timeout else None


def _number_in(text: str) -> int | None:
    """Number written in decimal digits; None if it has more of them than the longest timeout."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TIMEOUT))
    return int(text) if is_number else None


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
