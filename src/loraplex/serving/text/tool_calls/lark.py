"""Parts of a Lark grammar as llguidance reads it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_WHITE_SPACE: Final = r"\r?\n[ \t]{0,32}|[ \t]{1,2}"
"""Between the parts of a JSON text: enough to indent it, but never without an end."""


class Lark:
    """Collects rules; every method gives an expression to use in another rule."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """special_ids: the markers that are special tokens of the model, and no text."""
        self._special_ids = special_ids
        self._markers = re.compile("|".join(map(re.escape, special_ids))) if special_ids else None
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """Just this text, with the markers in it."""
        parts: list[str] = []
        at = 0
        for match in self._markers.finditer(text) if self._markers else ():
            parts += [*_quoted(text[at : match.start()]), f"<[{self._special_ids[match[0]]}]>"]
            at = match.end()
        return " ".join([*parts, *_quoted(text[at:])]) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON text of the schema."""
        guided = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}, **schema}
        return self._rule(f": %json {json.dumps(guided)}")

    def regex(self, pattern: str) -> str:
        """Without slashes; the pattern has none."""
        return self._terminal(f"/{pattern}/")

    def any_until(self, text: str) -> str:
        """Any text, and this one at its end, which is not in it before.

        `text` is not empty; if it has a marker, it begins with it.
        """
        if any(text.startswith(marker) for marker in self._special_ids):
            return f"({self.any_text()})? {self.text(text)}"
        return self._rule(f"[suffix={json.dumps(text)}]: /(?s:.*)/")

    def any_without(self, text: str) -> str:
        """Any text that is not empty, and does not hold this one."""
        if text in self._special_ids:
            return self.any_text()
        return self._terminal(f"/(?s:.+)/ & ~/(?s:.*{pattern_of(text)}.*)/")

    def any_text(self) -> str:
        return self.regex("(?s:.+)")

    def rule(self, expression: str) -> str:
        return self._rule(f": {expression}")

    def choice(self, expressions: Sequence[str]) -> str:
        return self._rule(f": {' | '.join(expressions)}")

    def grammar(self, start: str) -> str:
        """All of it; `start` is the expression of the whole text."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _rule(self, definition: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{definition}")
        return name

    def _terminal(self, definition: str) -> str:
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {definition}")
        return name


def pattern_of(text: str) -> str:
    """A regular expression of just this text: no character of it is an operator, nor a slash."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text
    )


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []
