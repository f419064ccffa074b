"""Arguments that are written as text, each in a frame, as rules of a grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.core.errors import InvalidParameterError
from loraplex.core.tools import FunctionTool
from loraplex.serving.text.tool_calls.lark import ANY, Lark, pattern_of
from loraplex.serving.text.tool_calls.parameters import (
    alternatives,
    definitions,
    properties,
    required,
    resolved,
    types,
)
from loraplex.serving.text.tool_calls.string_patterns import (
    ANY_STRING,
    StringForm,
    UnkeptError,
    string_form,
)


def members_rule(
    lark: Lark, tool: FunctionTool, before: str, after: str, without: Sequence[str]
) -> str:
    """The arguments in their schema's order; those that are not required may be left out.

    `before` has `{}` in the place of an argument's name; `after` is the marker that ends a value,
    and white space around it; `without` are the other texts at which a reader ends a value. Raises
    InvalidParameterError for a strict tool whose schema has more
    of a string than a grammar of text without quotes can keep to.
    """
    if "properties" not in tool.parameters:
        return _any_members(lark, before, after, without)
    needed = required(tool)
    rules = []
    for name, schema in properties(tool).items():
        head = lark.text(before.replace("{}", name))
        try:
            rule = f"{head} {_value_rule(lark, schema, after, without)}"
        except UnkeptError as error:
            if tool.is_strict:
                raise _refusal(tool, name, error) from None
            rule = f"{head} {_any_value(lark, after, without)}"
        rules.append(rule if name in needed else f"({rule})?")
    return lark.rule(" ".join(rules) or '""')


def _any_members(lark: Lark, before: str, after: str, without: Sequence[str]) -> str:
    start, _, end = before.partition("{}")
    name = lark.regex("[a-zA-Z0-9_-]{1,64}")
    value = _any_value(lark, after, without)
    return lark.rule(f"({lark.text(start)} {name} {lark.text(end)} {value})*")


def _any_value(
    lark: Lark, after: str, without: Sequence[str], form: StringForm = ANY_STRING
) -> str:
    """Grammar of any value. A reader ends it at the marker, whatever white space is there; but
    where patterns describe it, only the space of the frame surrounds it."""
    marker = after.strip()
    space, _, behind = after.partition(marker)
    framed = [f"({pattern}){pattern_of(space)}" for pattern in form.patterns] or [ANY]
    # A value that is too short for its pattern must not go on after the marker.
    ends = (marker, *without) if form.patterns else without
    value = lark.any_until(marker, ends, framed, may_be_empty=form.may_be_empty)
    return f"{value} {lark.text(behind)}"


def _refusal(tool: FunctionTool, name: str, error: UnkeptError) -> InvalidParameterError:
    return InvalidParameterError(
        f"the tool {tool.name!r} is strict, and this model writes strings without quotes, of which "
        f"{error} of the parameter {name!r} cannot be kept to: leave that out, or strict",
        param="tools",
    )


def _value_rule(lark: Lark, given: Mapping[str, Any], after: str, without: Sequence[str]) -> str:
    schema = resolved(given)
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and allowed:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in allowed]
        return f"({' | '.join(map(lark.text, texts))}) {lark.text(after)}"
    if schema.get("type") == "string":
        return _any_value(lark, after, without, string_form(schema))
    if "string" in types(given):
        rules = [_value_rule(lark, part, after, without) for part in _choices(given, schema)]
        return f"({' | '.join(rules)})"
    return f"{lark.json(given)} {lark.text(after)}"


def _choices(given: Mapping[str, Any], schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A schema for each type or alternative of one that allows a string, which has no quotes.

    Raises UnkeptError where alternatives have alternatives: they may go round.
    """
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [{**schema, "type": kind} for kind in kinds]
    shared = definitions(given)
    parts = [{**shared, **part} for part in alternatives(schema)]
    if not parts or any("string" in types(p) and alternatives(resolved(p)) for p in parts):
        raise UnkeptError("nested anyOf")
    return parts
