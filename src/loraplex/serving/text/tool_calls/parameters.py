"""Arguments one by one, for families that write each as text instead of one JSON object."""

import json
from collections.abc import Mapping
from typing import Any

from loraplex.core.tools import FunctionTool

_DEFINITIONS = ("$defs", "definitions")


def properties(tool: FunctionTool | None) -> dict[str, Mapping[str, Any]]:
    """The schemas of its arguments, each by itself; no tool and no schema: none."""
    if tool is None:
        return {}
    shared = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    own = tool.parameters.get("properties")
    if not isinstance(own, dict):
        return {}
    schemas = {name: {} if part is True else part for name, part in own.items()}
    return {name: {**shared, **part} for name, part in schemas.items() if isinstance(part, dict)}


def required(tool: FunctionTool) -> frozenset[str]:
    names = tool.parameters.get("required")
    return frozenset(names) if isinstance(names, list) else frozenset()


def types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; none: any type."""
    own = schema.get("type")
    if isinstance(own, str):
        return frozenset({own})
    if isinstance(own, list):
        return frozenset(name for name in own if isinstance(name, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"]))
    parts = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts):
        found = [types(part) for part in parts]
        return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def json_of(text: str, schema: Mapping[str, Any] | None) -> str:
    """The JSON text of an argument that was written without quotes.

    A string where the schema wants one, else what it is as JSON, and a string if it is none.
    """
    wanted = types(schema or {})
    if wanted == {"string"}:
        return json_text(text)
    try:
        value = json.loads(text)
        if isinstance(value, str) or ("string" in wanted and not _is_of(value, wanted)):
            value = text if "string" in wanted else value
        return json_text(value)
    except (ValueError, RecursionError):
        return json_text(text)


def json_text(value: Any) -> str:
    """Raises ValueError for a number that JSON has not.

    Escapes may have given half a character, which is no UTF-8: then all of them stay escaped.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _is_of(value: Any, wanted: frozenset[str]) -> bool:
    own = _type_of(value)
    return own in wanted or (own == "integer" and "number" in wanted)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


class ArgumentPieces:
    """The text of a JSON object, one member after the other."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def member(self, name: str, value: str) -> str:
        """`value` is JSON. Empty for a name that was given before: the first one counts."""
        if name in self._names:
            return ""
        start = ", " if self._names else "{"
        self._names.add(name)
        return f"{start}{json.dumps(name, ensure_ascii=False)}: {value}"

    def end(self) -> str:
        return "}" if self._names else "{}"
