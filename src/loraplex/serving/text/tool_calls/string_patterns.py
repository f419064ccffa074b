"""Keywords of a JSON schema for strings, as regular expressions of the whole string."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

_PART: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A character of an expression, an escape or a class."""


class UnkeptError(Exception):
    """Text of a keyword and its value which no expression of ours can enforce."""


class StringForm(NamedTuple):
    """A string is of the schema if it is of all the patterns."""

    patterns: Sequence[str]
    """Pattern without its slashes."""
    may_be_empty: bool


ANY_STRING: Final = StringForm((), may_be_empty=True)


def string_form(schema: Mapping[str, Any]) -> StringForm:
    """Return the patterns of a schema that llguidance accepts. Raises UnkeptError."""
    if "format" in schema:
        raise UnkeptError(f"format {schema['format']!r}")
    patterns = []
    least = schema.get("minLength", 0)
    if least or "maxLength" in schema:
        patterns.append(f"(?s:.{{{least},{schema.get('maxLength', '')}}})")
    pattern = schema.get("pattern", "")
    if pattern:
        patterns.append(_whole(pattern))
    return StringForm(patterns, may_be_empty=not least and _takes_nothing(pattern))


def _whole(pattern: str) -> str:
    """Return the pattern of a whole string which contains the pattern anywhere."""
    parts = _PART.findall(pattern)
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = parts[begins : len(parts) - ends]
    if (begins or ends) and "|" in _outside_groups(inner):
        raise UnkeptError(f"pattern {pattern!r}")
    before, after = "" if begins else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"{before}({''.join(map(_one_line, inner))}){after}"


def _one_line(part: str) -> str:
    """Return the pattern in the form that a grammar can contain."""
    text = part.replace("\\/", "/").replace("/", r"\x{2f}")
    return text.replace("\n", r"\n").replace("\r", r"\r")


def _outside_groups(parts: Sequence[str]) -> Iterator[str]:
    depth = 0
    for part in parts:
        depth += (part == "(") - (part == ")")
        if depth == 0:
            yield part


def _takes_nothing(pattern: str) -> bool:
    try:
        return re.search(pattern, "") is not None
    except re.error:  # what only llguidance's expressions have, such as \pL
        return False
