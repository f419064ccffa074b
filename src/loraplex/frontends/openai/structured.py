"""Constraints of an output, in every form that clients send: OpenAI's response_format with
llgtrt's, LoRAX's and vLLM's types, vLLM's structured_outputs and its older guided_* fields, and
SGLang's.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.frontends.openai.schema import SamplingBody
from loraplex.frontends.structured_outputs import (
    COMPACT,
    constraint,
    json_schema,
    structured_outputs,
    text_of,
)

_ANY_OBJECT: Final = '{"type": "object"}'


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
    first = constraints[0]
    for other in constraints[1:]:
        # Clients that speak to servers of any age send the same in the new field and in the old.
        if other.grammar != first.grammar:
            raise InvalidParameterError(
                f"{first.field} and {other.field} both constrain the output; give one of them",
                param=other.field,
            )
    return first.grammar


def constraint_field(body: SamplingBody) -> str:
    """Return the field with the constraint that grammar_of reads; empty if there is none."""
    if (body.response_format or {"type": "text"}).get("type") != "text":
        return "response_format"
    for name, value in (body.structured_outputs or {}).items():
        if value is not None and value is not False and name != COMPACT:
            return f"structured_outputs.{name}"
    return next((field for field in _GUIDED if getattr(body, field) is not None), "")


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


def _object_format(fields: Mapping[str, Any]) -> Grammar:
    """LoRAX's format has a schema in addition to the type."""
    schema = fields.get("schema")
    if schema is None:
        return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    return constraint("response_format.schema", "json", schema)


def _schema_format(fields: Mapping[str, Any]) -> Grammar:
    inner = fields.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
        raise InvalidParameterError(
            "response_format.json_schema must be an object with the schema in 'schema', as "
            '{"name": "reply", "schema": {"type": "object"}}',
            param="response_format",
        )
    return json_schema(inner["schema"])


def _text_format(name: str, kind: GrammarKind) -> Callable[[Mapping[str, Any]], Grammar]:
    def read(fields: Mapping[str, Any]) -> Grammar:
        return Grammar(kind, text_of(f"response_format.{name}", fields.get(name)))

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
        "json_object": _object_format,
        "json_schema": _schema_format,
        "regex": _text_format("regex", GrammarKind.REGEX),
        "lark_grammar": _text_format("lark_grammar", GrammarKind.LARK),
        "ebnf": _text_format("ebnf", GrammarKind.EBNF),
        "llguidance": _llguidance_format,
    }
)


# ---------------------------------------------------------------- vLLM's and SGLang's


def _guided(body: SamplingBody) -> Iterator[_Constraint]:
    for field, kind in _GUIDED.items():
        value = getattr(body, field)
        if value is None:
            continue
        if field == "ebnf":
            yield _Constraint(field, Grammar(GrammarKind.EBNF, text_of(field, value)))
        else:
            yield _Constraint(field, constraint(field, kind, value))


_GUIDED: Final = MappingProxyType(
    {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "json_schema": "json",
        "regex": "regex",
        "ebnf": "grammar",
    }
)
"""Field: its kind of constraint. The last three are SGLang's."""
CONSTRAINTS: Final = frozenset({"response_format", "structured_outputs", *_GUIDED})
"""Fields that grammar_of reads."""


def _structured_outputs(fields: Mapping[str, Any]) -> Iterator[_Constraint]:
    owner = "structured_outputs"
    return (_Constraint(owner, grammar) for grammar in structured_outputs(owner, fields))
