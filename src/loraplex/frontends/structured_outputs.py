"""Constraints of outputs, in the form of vLLM's field structured_outputs."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.grammar import Grammar, GrammarKind

_ANY_OBJECT: Final = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
_EBNF_ARROW: Final = "::="
"""What GBNF has and Lark has not."""


SERVED_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
COMPACT: Final = "disable_any_whitespace"
"""Option of JSON constraints: no white space between the parts of the text."""
SERVED_FIELDS: Final = (*SERVED_KINDS, COMPACT)
_GUIDANCE: Final = "x-guidance"
"""Key of a schema with llguidance's options for it."""


def structured_outputs(owner: str, fields: Mapping[str, Any]) -> Iterator[Grammar]:
    """Each that is said; `owner` is what the client calls the object.

    Raises InvalidParameterError for another shape, UnsupportedFeatureError for an unknown one.
    """
    for name, value in fields.items():
        if value is None or (value is False and name != "json"):
            continue
        field = f"{owner}.{name}"
        if name in ("json_object", COMPACT) and value is not True:
            raise InvalidParameterError(
                f"{field} must be true or false, got {value!r}", param=field
            )
        if name == COMPACT:
            continue
        if name in SERVED_KINDS:
            grammar = _ANY_OBJECT if name == "json_object" else constraint(field, name, value)
            yield _without_blanks(grammar) if fields.get(COMPACT) is True else grammar
        else:
            raise UnsupportedFeatureError(
                f"{field} is not supported; known: {', '.join(SERVED_FIELDS)}",
                param=field,
            )


def _without_blanks(grammar: Grammar) -> Grammar:
    """Return a constraint whose JSON has no white space; options in a schema itself win."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        return grammar
    options = {"whitespace_flexible": False, **schema.get(_GUIDANCE, {})}
    return json_schema({**schema, _GUIDANCE: options})


def constraint(field: str, name: str, value: Any) -> Grammar:
    """Return the constraint of type `name`: json, regex, choice or grammar.

    field: the name that the client gave it.
    """
    match name:
        case "json":
            return json_schema(_parsed(field, value))
        case "regex":
            return Grammar(GrammarKind.REGEX, text_of(field, value))
        case "choice":
            return Grammar(GrammarKind.CHOICE, json.dumps(_choices(field, value)))
        case _:
            text = text_of(field, value)
            is_ebnf = _EBNF_ARROW in text
            return Grammar(GrammarKind.EBNF if is_ebnf else GrammarKind.LARK, text)


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


def json_schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def text_of(field: str, value: Any) -> str:
    """Raises InvalidParameterError for an empty one, or something else."""
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(f"{field} must be a text that is not empty", param=field)
    return value


def _choices(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise InvalidParameterError(f"{field} must be a list of at least one string", param=field)
    return value
