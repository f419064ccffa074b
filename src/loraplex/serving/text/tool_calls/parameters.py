"""Arguments one by one, for families that write each as text instead of one JSON object."""

import json
from collections.abc import Mapping
from typing import Any

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.tool_calls.json_text import json_word, repaired_json

_DEFINITIONS = ("$defs", "definitions", "x-guidance")
"""Keywords of a schema that its parts need, too; the last has llguidance's options."""
_MAX_REFERENCES = 256


def properties(tool: FunctionTool | None) -> dict[str, Mapping[str, Any]]:
    """The schemas of its arguments, each by itself; no tool and no schema: none."""
    if tool is None:
        return {}
    shared = definitions(tool.parameters)
    own = resolved(tool.parameters).get("properties")
    if not isinstance(own, dict):
        return {}
    schemas = {name: {} if part is True else part for name, part in own.items()}
    return {name: {**shared, **part} for name, part in schemas.items() if isinstance(part, dict)}


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a part of the schema needs to be a schema by itself."""
    return {key: schema[key] for key in _DEFINITIONS if key in schema}


def required(tool: FunctionTool) -> frozenset[str]:
    names = tool.parameters.get("required")
    return frozenset(names) if isinstance(names, list) else frozenset()


class _Resolver:
    """Follows the references of a schema. They may go round, and double with each step, so only
    so many are followed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MAX_REFERENCES

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema with what its `$ref` names and its `allOf` holds merged into it."""
        parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
        if isinstance(schema.get("$ref"), str):
            parts.append(self._referenced(schema["$ref"]))
        merged: dict[str, Any] = {}
        for part in parts:
            self._left -= 1
            if isinstance(part, dict) and self._left > 0:
                merged |= self.resolved(part)
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        return {**merged, **own} if merged else schema

    def types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        schema = self.resolved(schema)
        null = frozenset({"null"}) if schema.get("nullable") is True else frozenset[str]()
        own = schema.get("type")
        if isinstance(own, str):
            return null | {own}
        if isinstance(own, list):
            return null | frozenset(name for name in own if isinstance(name, str))
        if "const" in schema:
            return null | {_type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            return null | frozenset(map(_type_of, schema["enum"]))
        found = [self.types(part) for part in alternatives(schema) if self._left > 0]
        return null.union(*found) if found and all(found) else frozenset()

    def _referenced(self, reference: str) -> Any:
        """The part of the root that a reference names; None if it names none."""
        start, *steps = reference.split("/")
        part: Any = self._root if start == "#" else None
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, dict) else None
        return part


def alternatives(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of which a value has to match one; none if that is not all of them."""
    parts = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        return parts
    return []


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with what its `$ref` names and its `allOf` holds merged into it."""
    return _Resolver(schema).resolved(schema)


def types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; none: any type."""
    return _Resolver(schema).types(schema)


def json_of(text: str, schema: Mapping[str, Any] | None) -> str:
    """The JSON text of an argument that was written without quotes.

    A string where the schema wants one, else what it is as JSON, repaired for the type that the
    schema wants, and a string if it is none.
    """
    wanted = types(schema or {})
    if wanted == {"string"}:
        return json_text(text)
    try:
        value = json.loads(_repaired(text, wanted))
        if isinstance(value, str) or ("string" in wanted and not _is_of(value, wanted)):
            value = text if "string" in wanted else value
        return json_text(value)
    except (ValueError, RecursionError):
        return json_text(text)


def _repaired(text: str, wanted: frozenset[str]) -> str:
    """Return the text as JSON, if it is nearly that of a type that is wanted."""
    near = text.strip()
    if "string" not in wanted and near[:1] in ("{", "["):
        return (repaired_json(near) if wanted & {"object", "array"} else None) or text
    if "boolean" in wanted and near.lower() in ("true", "false"):
        return near.lower()
    sure = wanted & {"null"} if "string" in wanted else wanted
    word = json_word(near)
    return word if word is not None and _is_of(json.loads(word), sure) else text


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
