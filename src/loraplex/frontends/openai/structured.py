"""What an output must match, in every way that clients say it: OpenAI's response_format with
llgtrt's and vLLM's types, vLLM's structured_outputs and its older guided_* fields.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.frontends.openai.schema import SamplingBody

_ANY_OBJECT: Final = '{"type": "object"}'
_EBNF_ARROW: Final = "::="
"""What GBNF has and Lark has not."""


class _Constraint(NamedTuple):
    """One of them, and the field that it stands in."""

    field: str
    grammar: Grammar


def grammar_of(body: SamplingBody) -> Grammar | None:
    """Raises InvalidParameterError for more than one, or one of another shape."""
    constraints = [
        *_response_format(body.response_format),
        *_structured_outputs(body.structured_outputs or {}),
        *_guided(body),
    ]
    if not constraints:
        return None
    if len(constraints) > 1:
        names = " and ".join(constraint.field for constraint in constraints)
        raise InvalidParameterError(
            f"{names} both say what the output is to be; give one of them",
            param=constraints[1].field,
        )
    return constraints[0].grammar


# ---------------------------------------------------------------- response_format


def _response_format(fields: Mapping[str, Any] | None) -> Iterator[_Constraint]:
    if fields is None or fields.get("type") == "text":
        return
    kind = fields.get("type")
    read = _RESPONSE_FORMATS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise InvalidParameterError(
            f"response_format.type must be one of text, {', '.join(_RESPONSE_FORMATS)}; got "
            f"{kind!r}",
            param="response_format",
        )
    yield _Constraint("response_format", read(fields))


def _schema_format(fields: Mapping[str, Any]) -> Grammar:
    inner = fields.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
        raise InvalidParameterError(
            "response_format.json_schema must be an object with the schema in 'schema', as "
            '{"name": "answer", "schema": {"type": "object"}}',
            param="response_format",
        )
    return _json_schema(inner["schema"])


def _text_format(name: str, kind: GrammarKind) -> Callable[[Mapping[str, Any]], Grammar]:
    def read(fields: Mapping[str, Any]) -> Grammar:
        return Grammar(kind, _text(f"response_format.{name}", fields.get(name)))

    return read


def _llguidance_format(fields: Mapping[str, Any]) -> Grammar:
    grammar = fields.get("grammar")
    if not isinstance(grammar, dict):
        raise InvalidParameterError(
            "response_format.grammar must be an object: a grammar as llguidance writes it",
            param="response_format",
        )
    return Grammar(GrammarKind.LLGUIDANCE, json.dumps(grammar))


_RESPONSE_FORMATS: Final[Mapping[str, Callable[[Mapping[str, Any]], Grammar]]] = MappingProxyType(
    {
        "json_object": lambda _: Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT),
        "json_schema": _schema_format,
        "regex": _text_format("regex", GrammarKind.REGEX),
        "lark_grammar": _text_format("lark_grammar", GrammarKind.LARK),
        "ebnf": _text_format("ebnf", GrammarKind.EBNF),
        "llguidance": _llguidance_format,
    }
)


# ---------------------------------------------------------------- vLLM's


def _guided(body: SamplingBody) -> Iterator[_Constraint]:
    fields = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    for name, value in fields.items():
        if value is not None:
            yield _constraint(f"guided_{name}", name, value)


def _structured_outputs(fields: Mapping[str, Any]) -> Iterator[_Constraint]:
    for name, value in fields.items():
        if value is None or (value is False and name != "json"):
            continue
        field = f"structured_outputs.{name}"
        if name == "json_object":
            if value is not True:
                raise InvalidParameterError(
                    f"{field} must be true or false, got {value!r}", param=field
                )
            yield _Constraint(field, Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT))
        elif name in ("json", "regex", "choice", "grammar"):
            yield _constraint(field, name, value)
        else:
            raise UnsupportedFeatureError(
                f"{field} is not supported; known are json, json_object, regex, choice, grammar",
                param=field,
            )


def _constraint(field: str, name: str, value: Any) -> _Constraint:
    match name:
        case "json":
            grammar = _json_schema(_parsed(field, value))
        case "regex":
            grammar = Grammar(GrammarKind.REGEX, _text(field, value))
        case "choice":
            grammar = Grammar(GrammarKind.CHOICE, json.dumps(_choices(field, value)))
        case _:
            text = _text(field, value)
            is_ebnf = _EBNF_ARROW in text
            grammar = Grammar(GrammarKind.EBNF if is_ebnf else GrammarKind.LARK, text)
    return _Constraint(field, grammar)


def _parsed(field: str, value: Any) -> Any:
    """vLLM takes a schema as a JSON text, too."""
    if not isinstance(value, str):
        schema = value
    else:
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError(f"{field} is not JSON: {error}", param=field) from None
    if not isinstance(schema, dict | bool):
        raise InvalidParameterError(f"{field} must be a JSON schema, an object", param=field)
    return schema


def _json_schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(f"{field} must be a text that is not empty", param=field)
    return value


def _choices(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise InvalidParameterError(f"{field} must be a list of at least one string", param=field)
    return value
