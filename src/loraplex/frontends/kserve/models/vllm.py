"""Conversion of a request to the vLLM backend to a GenerateRequest and the form of its outputs.

Where a sampling parameter is missing, the defaults are vLLM's: 16 tokens, temperature 1, all
tokens, an end at the model's end token. The fields are those of vLLM 0.3.0 and of its versions
since. A value may be a text, as requests' parameters often are: it is read as its field's type.
Pure.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    InvalidTensorError,
    UnsupportedFeatureError,
)
from loraplex.core.grammar import Grammar
from loraplex.core.request import REPEATED_BYTES, GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.support import Support
from loraplex.core.task import Generate
from loraplex.frontends.kserve.errors import lora_failure
from loraplex.frontends.kserve.messages import REQUEST_PARAMETERS, REQUEST_TYPE, Parameter
from loraplex.frontends.kserve.models.convert import RequestHead, TritonGeneration, read_adapters
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import FIELDS, LORA_NAME, Field, FieldType
from loraplex.frontends.kserve.models.triton_model import ModelOptions, TritonModel
from loraplex.frontends.structured_outputs import structured_outputs

_TRUE_WORDS = ("true", "1", "yes", "t", "y")
_FALSE_WORDS = ("false", "0", "no", "f", "n", "")
_MAX_SHOWN_CHARS = 60


def read_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The used fields that have a value, as their types; null is no value.

    Raises InvalidParameterError for an unknown field or a value of another type,
    UnsupportedFeatureError for a field that is refused.
    """
    values: dict[str, Any] = {}
    for name, value in raw.items():
        field = FIELDS.get(name)
        if field is None:
            raise InvalidParameterError(
                f"Unexpected sampling parameter '{name}'; the parameters are {', '.join(FIELDS)}",
                param=name,
            )
        if value is None or field.support is Support.NO_EFFECT:
            continue
        if field.support is Support.REFUSED:
            _check_neutral(field, value)
        else:
            values[name] = _cast(field, value)
    return values


def _check_neutral(field: Field, value: object) -> None:
    if not any(type(value) is type(neutral) and value == neutral for neutral in field.neutral):
        raise UnsupportedFeatureError(
            f"sampling parameter '{field.name}' requests {field.reason}, which is not served; "
            "leave it out",
            param=field.name,
        )


def _cast(field: Field, value: Any) -> Any:
    assert field.type is not None
    try:
        return _READERS[field.type](value)
    except (ValueError, RecursionError):
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
        raise InvalidParameterError(
            f"sampling parameter '{field.name}' must be {field.type.value}, got {shown}",
            param=field.name,
        ) from None


# ---------------------------------------------------------------- readers: they raise ValueError


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    try:
        return float(value)
    except OverflowError:
        raise ValueError from None


def _flag(value: Any) -> bool:
    word = str(value).lower() if isinstance(value, bool | int | str) else "?"
    if word not in _TRUE_WORDS + _FALSE_WORDS:
        raise ValueError
    return word in _TRUE_WORDS


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """A single text is one of them, whatever it looks like. Empty ones are left out."""
    items = [value] if isinstance(value, str) else [_text(item) for item in _list(value)]
    return tuple(filter(None, items))


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(_integer(item) for item in _list(_parsed(value)))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError
    return value


def _object(value: Any) -> dict[str, Any]:
    parsed = _parsed(value)
    if not isinstance(parsed, dict):
        raise ValueError
    return parsed


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _early_stopping(value: Any) -> bool | str:
    return "never" if value == "never" else _flag(value)


_READERS: Mapping[FieldType, Callable[[Any], Any]] = MappingProxyType(
    {
        FieldType.INTEGER: _integer,
        FieldType.NUMBER: _number,
        FieldType.FLAG: _flag,
        FieldType.TEXT: _text,
        FieldType.TEXTS: _texts,
        FieldType.INTEGERS: _integers,
        FieldType.OBJECT: _object,
        FieldType.EARLY_STOPPING: _early_stopping,
    }
)


OTHER_PARAMETERS = frozenset(row.name for row in REQUEST_PARAMETERS if row.name != REQUEST_TYPE)
"""Request parameters of Triton, its clients or loraplex, which are no sampling parameters."""
TRITON_PREFIX = "triton_"
"""Prefix of Triton's further parameters."""

_PARAMETERS = frozenset(SamplingParams.__struct_fields__)
"""Their names, values and defaults are those of vLLM's fields."""
_NO_SEED = -1
RETURNED = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
"""Outputs that are returned if the input `return_NAME` is true."""
_EARLY_STOPPING: Mapping[object, EarlyStopping] = MappingProxyType(
    {
        True: EarlyStopping.AT_ONCE,
        False: EarlyStopping.WHEN_UNLIKELY,
        "never": EarlyStopping.NEVER,
    }
)


def convert_vllm(
    inputs: Inputs,
    model: TritonModel,
    head: RequestHead,
    parameters: Mapping[str, Parameter],
) -> TritonGeneration:
    """Raises RequestErrors, and FailedResponse for an adapter that cannot be had."""
    prompt = "".join(inputs.texts("text_input"))
    if not prompt:
        raise InvalidTensorError("input 'text_input' is empty", param="text_input")
    fields = read_fields(raw_fields(inputs, parameters))
    returned = frozenset(name for name in RETURNED if inputs.first(f"return_{name}"))
    shows_logprobs = "logprobs" in returned and "logprobs" in fields
    if "cumulative_logprob" in returned:
        fields.setdefault("logprobs", 0)
    is_streamed = inputs.first("is_streamed", default=False)
    excludes_input = _excludes_input(inputs)
    return TritonGeneration(
        request=GenerateRequest(
            **msgspec.structs.asdict(head),
            prompt=prompt,
            task=Generate(vllm_sampling(fields)),
            adapters=named_adapters(fields, parameters.get("adapters", ""), model.options),
            ends_at_max_len=True,
            repeated_bytes=REPEATED_BYTES * (not (is_streamed or excludes_input)),
        ),
        is_streamed=is_streamed,
        excludes_input=excludes_input,
        returned=returned,
        token_text=model.texts.token_texts() if shows_logprobs else None,
        comes_together=True,
    )


def _excludes_input(inputs: Inputs) -> bool:
    """A single response begins with the input by default; a stream never does."""
    excludes: bool = inputs.first("excludes_input", default=False)
    if inputs.first("is_streamed") and "excludes_input" in inputs.tensors and not excludes:
        raise InvalidRequestError(
            "When streaming, `exclude_input_in_output` = False is not allowed.",
            param="exclude_input_in_output",
        )
    return excludes


def raw_fields(inputs: Inputs, parameters: Mapping[str, Parameter]) -> Mapping[str, Any]:
    """Return fields of the tensor, or without it of the request. Raises InvalidParameterError."""
    text = "".join(inputs.texts("sampling_parameters"))
    if not text:
        return {
            name: value
            for name, value in parameters.items()
            if name not in OTHER_PARAMETERS and not name.startswith(TRITON_PREFIX)
        }
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(
            f"'sampling_parameters' is not JSON: {error}", param="sampling_parameters"
        ) from None
    if not isinstance(fields, dict):
        raise InvalidParameterError(
            "'sampling_parameters' must be a JSON object, as {\"temperature\": 0}",
            param="sampling_parameters",
        )
    return fields


def named_adapters(
    fields: Mapping[str, Any], parameter: Parameter, options: ModelOptions
) -> tuple[AdapterChoice, ...]:
    """Return the adapter of the field lora_name, or those of the parameter `adapters`.

    Raises InvalidParameterError, and FailedResponse where adapters are off.
    """
    choices = read_adapters(parameter)
    name = fields.get(LORA_NAME, "")
    if name and choices:
        raise InvalidParameterError(
            f"the parameters 'adapters' and '{LORA_NAME}' both name an adapter; put all of them "
            "into 'adapters'",
            param="adapters",
        )
    if (name or choices) and not options.lora_enabled:
        raise lora_failure(InvalidRequestError("LoRA feature is not enabled.", param=LORA_NAME))
    return (AdapterChoice(ByName(name)),) if name else choices


# ---------------------------------------------------------------- sampling


def vllm_sampling(fields: Mapping[str, Any]) -> SamplingParams:
    """Make SamplingParams of the values of `read_fields`.

    Raises InvalidParameterError.
    """
    values = {name: value for name, value in fields.items() if name in _PARAMETERS}
    if values.get("seed") == _NO_SEED:
        del values["seed"]
    return SamplingParams(
        **values
        | {
            "include_stop_in_output": fields.get("include_stop_str_in_output", False),
            "logit_bias": _logit_bias(fields.get("logit_bias", {})),
            "grammar": _grammar(fields),
        }
        | (_beams(fields) if fields.get("use_beam_search", False) else {})
    )


def _beams(fields: Mapping[str, Any]) -> dict[str, Any]:
    n, best_of = fields.get("n", 1), fields.get("best_of")
    beam = BeamSearch(
        width=n if best_of is None else best_of,
        length_penalty=fields.get("length_penalty", 1.0),
        early_stopping=_EARLY_STOPPING[fields.get("early_stopping", False)],
    )
    return {"best_of": None, "beam": beam}


def _logit_bias(biases: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Its keys are token ids as texts, as JSON has them."""
    try:
        pairs = {int(token_id): float(bias) for token_id, bias in biases.items()}
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameterError(
            "sampling parameter 'logit_bias' must be a JSON object of token ids and numbers, as "
            '{"50256": -100}',
            param="logit_bias",
        ) from None
    return tuple(sorted(pairs.items()))


def _grammar(fields: Mapping[str, Any]) -> Grammar | None:
    grammars = [
        grammar
        for name in ("structured_outputs", "guided_decoding")
        for grammar in structured_outputs(name, fields.get(name, {}))
    ]
    if len(grammars) > 1:
        raise InvalidParameterError(
            "sampling parameter 'structured_outputs' must have one of json, json_object, regex, "
            f"choice, grammar; {len(grammars)} are said",
            param="structured_outputs",
        )
    return grammars[0] if grammars else None
