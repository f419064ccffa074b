"""The fields of vLLM's SamplingParams: what each does here, and the type that its value has.

They are those of vLLM 0.3.0 and of its versions since. A value may be a text, as requests'
parameters often are: it is read as its field's type.
"""

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.support import Feature, Support

LORA_NAME = "lora_name"
"""The adapter, which is not a field of SamplingParams."""

_TRUE_WORDS = ("true", "1", "yes", "t", "y")
_FALSE_WORDS = ("false", "0", "no", "f", "n", "")
_MAX_SHOWN_CHARS = 60


class FieldType(enum.Enum):
    """Type of a field; `value` is its name in errors."""

    INTEGER = "an integer"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXT = "a text"
    TEXTS = "a text or a list of texts"
    INTEGERS = "a list of integers"
    OBJECT = "a JSON object"
    EARLY_STOPPING = 'true, false or "never"'


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One row."""

    name: str
    type: FieldType | None
    """None: any; of a field whose value is not read."""
    support: Support = Support.WORKS
    neutral: tuple[object, ...] = ()
    """Values of a refused field that are accepted; null always is."""
    reason: str = ""
    """Why a field has no effect, or what a refused field would request."""

    @property
    def feature(self) -> Feature:
        form = "" if self.type is None else self.type.value
        return Feature(self.name, self.support, self.reason, form)


def _no_effect(name: str, reason: str) -> Field:
    return Field(name, None, Support.NO_EFFECT, reason=reason)


def _refused(name: str, reason: str, *neutral: object) -> Field:
    return Field(name, None, Support.REFUSED, neutral, reason)


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        field.name: field
        for field in (
            Field("n", FieldType.INTEGER),
            Field("best_of", FieldType.INTEGER),
            Field("presence_penalty", FieldType.NUMBER),
            Field("frequency_penalty", FieldType.NUMBER),
            Field("repetition_penalty", FieldType.NUMBER),
            Field("temperature", FieldType.NUMBER),
            Field("top_p", FieldType.NUMBER),
            Field("top_k", FieldType.INTEGER),
            Field("min_p", FieldType.NUMBER),
            Field("seed", FieldType.INTEGER),
            Field("use_beam_search", FieldType.FLAG),
            Field("length_penalty", FieldType.NUMBER),
            Field("early_stopping", FieldType.EARLY_STOPPING),
            Field("stop", FieldType.TEXTS),
            Field("stop_token_ids", FieldType.INTEGERS),
            Field("include_stop_str_in_output", FieldType.FLAG),
            Field("bad_words", FieldType.TEXTS),
            Field("ignore_eos", FieldType.FLAG),
            Field("max_tokens", FieldType.INTEGER),
            Field("min_tokens", FieldType.INTEGER),
            Field("logprobs", FieldType.INTEGER),
            Field("skip_special_tokens", FieldType.FLAG),
            Field("logit_bias", FieldType.OBJECT),
            Field("allowed_token_ids", FieldType.INTEGERS),
            Field("structured_outputs", FieldType.OBJECT),
            Field("guided_decoding", FieldType.OBJECT),
            Field(LORA_NAME, FieldType.TEXT),
            _no_effect("prompt_logprobs", "the backend has no output for them"),
            _no_effect("spaces_between_special_tokens", "only slow tokenizers put spaces there"),
            _no_effect("output_kind", "`stream` decides what is returned when"),
            _no_effect("flat_logprobs", "how vLLM keeps them, not what they are"),
            _no_effect("skip_clone", "how vLLM handles the object"),
            _no_effect("skip_reading_prefix_cache", "a prefix hit changes no output"),
            _refused("detokenize", "token ids instead of text", True, "true", "True"),
            _refused("logits_processors", "code in a request", [], "[]"),
            _refused("truncate_prompt_tokens", "a shortened prompt"),
            _refused("extra_args", "arguments of vLLM's plugins", {}, "{}"),
            _refused("thinking_token_budget", "a limit for thinking"),
        )
    }
)


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
    """A single text is one of them, whatever it looks like."""
    return (value,) if isinstance(value, str) else tuple(_text(item) for item in _list(value))


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
