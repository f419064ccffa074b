"""What an output must match, in every way that clients say it: OpenAI's response_format with
llgtrt's and vLLM's types, vLLM's structured_outputs and its older guided_* fields.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.frontends.openai.schema import SamplingBody
from loraplex.frontends.structured_outputs import (
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
            field = f"guided_{name}"
            yield _Constraint(field, constraint(field, name, value))


def _structured_outputs(fields: Mapping[str, Any]) -> Iterator[_Constraint]:
    owner = "structured_outputs"
    return (_Constraint(owner, grammar) for grammar in structured_outputs(owner, fields))
