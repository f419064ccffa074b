"""Requests for a value of their prompt: the outputs `embedding` and `probabilities`.

A client names such an output; inputs that state how to generate then have no effect. A request to
the vLLM backend may instead send `embedding_request`, as Triton's OpenAI front end does, and gets
its vector as a JSON list in `text_output`. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from loraplex.core.errors import InvalidParameterError, InvalidTensorError
from loraplex.core.request import GenerateRequest, Prefix
from loraplex.core.task import Pool
from loraplex.frontends.kserve.messages import DIMENSIONS, PROMPT_NAME, Parameter
from loraplex.frontends.kserve.models.convert import (
    RequestHead,
    TritonGeneration,
    prompt_of,
    request_adapters,
)
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import EMBEDDING, PROBABILITIES, BackendDialect
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.models.vllm import RETURNED, named_adapters, raw_fields, read_fields

POOLED = frozenset({EMBEDDING.name, PROBABILITIES.name})
_REQUEST = "embedding_request"
_JSON_OUTPUT = "text_output"
_OF_TOKENS = frozenset({"num_input_tokens", "num_output_tokens"})
"""Outputs of the vLLM backend that come next to a vector."""


def is_pooled(requested: Sequence[str]) -> bool:
    """Whether outputs that a client names are a value of the prompt.

    Raises InvalidTensorError if others are named, too: one request is one computation.
    """
    pooled = POOLED.intersection(requested)
    others = [name for name in requested if name not in pooled and name not in _OF_TOKENS]
    if pooled and (len(pooled) > 1 or others):
        first = min(pooled)
        other = next(iter(others), max(pooled))
        raise InvalidTensorError(
            f"output '{first}' cannot be requested together with '{other}': send a request for "
            "each",
            param=first,
        )
    return bool(pooled)


def pooled_output(inputs: Inputs, requested: Sequence[str]) -> str:
    """Return the name of the output that has the value of the prompt; empty: none has."""
    pooled = next((name for name in requested if name in POOLED), "")
    return pooled or (_JSON_OUTPUT if "".join(inputs.texts(_REQUEST)) else "")


def check_not_pooled(parameters: Mapping[str, Parameter]) -> None:
    """Raise InvalidParameterError for a parameter of vectors in a request without one."""
    for name in (DIMENSIONS, PROMPT_NAME):
        if name in parameters:
            raise InvalidParameterError(
                f"the parameter '{name}' is for the output '{EMBEDDING.name}': request it, or "
                "leave the parameter out",
                param=name,
            )


def convert_pooled(
    inputs: Inputs,
    model: TritonModel,
    head: RequestHead,
    parameters: Mapping[str, Parameter],
    output: str,
) -> TritonGeneration:
    """Return the request for an output of `pooled_output`. Raises as `convert`, and
    UnsupportedFeatureError for a model without such values."""
    of_vllm = _embedding_request(inputs)
    if output == PROBABILITIES.name:
        check_not_pooled({**parameters, **of_vllm})
        pool, prefix = model.card.classes.pool(), None
    else:
        pool, prefix = _vector(model, parameters, of_vllm.get(DIMENSIONS))
    is_vllm = model.kind.dialect is BackendDialect.VLLM
    inline_adapter = None
    if is_vllm:
        fields = read_fields(raw_fields(inputs, parameters))
        choices = named_adapters(fields, parameters.get("adapters", ""), model.options)
    else:
        inline_adapter, choices = request_adapters(
            inputs, parameters.get("adapters", ""), model.options
        )
    return TritonGeneration(
        request=GenerateRequest(
            **msgspec.structs.asdict(head),
            prompt=of_vllm["input"] if of_vllm else prompt_of(inputs, model.card, model.options),
            prefix=prefix,
            task=pool,
            adapters=choices,
            add_special_tokens=is_vllm or model.options.adds_special_tokens,
        ),
        inline_adapter=inline_adapter,
        pooled_output=output,
        excludes_input=True,
        returned=_OF_TOKENS.intersection(
            name for name in RETURNED if inputs.first(f"return_{name}")
        ),
        comes_together=True,
    )


def _vector(
    model: TritonModel, parameters: Mapping[str, Parameter], dimensions: Parameter | None
) -> tuple[Pool, Prefix]:
    vectors = model.card.vectors
    pool = vectors.pool(dimensions=parameters.get(DIMENSIONS, dimensions))  # type: ignore[arg-type]
    pool.validate()  # the type of a parameter, too
    name = parameters.get(PROMPT_NAME)
    return pool, Prefix(None if name is None else str(name))


def _embedding_request(inputs: Inputs) -> dict[str, Any]:
    """Read `embedding_request`: its `input`, and `dimensions` if it has any. Empty: not sent.

    The original takes the first of a list of dimensions. Raises InvalidTensorError.
    """
    text = "".join(inputs.texts(_REQUEST))
    if not text:
        return {}
    try:
        sent = msgspec.json.decode(text, type=_EmbeddingRequest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidTensorError(
            f"input '{_REQUEST}' must be a JSON object with 'input', a text or a list of token "
            f"ids, and maybe 'pooling_params': {error}",
            param=_REQUEST,
        ) from None
    if not sent.input:
        raise InvalidTensorError(f"'input' of input '{_REQUEST}' is empty", param=_REQUEST)
    found = sent.pooling_params.dimensions
    first = found[0] if isinstance(found, list) else found
    return {"input": sent.input, **({} if first is None else {DIMENSIONS: first})}


class _PoolingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dimensions: int | Annotated[list[int], msgspec.Meta(min_length=1)] | None = None


class _EmbeddingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: str | tuple[int, ...]
    pooling_params: _PoolingParams = _PoolingParams()
