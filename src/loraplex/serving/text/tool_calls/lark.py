"""Parts of a Lark grammar as llguidance reads it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

JSON_WHITE_SPACE: Final = r"\r?\n[ \t]{0,32}|[ \t]{1,2}"
"""White space between the parts of a JSON text: enough to indent it, but bounded."""

ANY: Final = "(?s:.*)"


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
        options = {"whitespace_pattern": JSON_WHITE_SPACE, **schema.get("x-guidance", {})}
        guided = {**schema, "x-guidance": options}
        return self._rule(f": %json {json.dumps(guided)}")

    def regex(self, pattern: str) -> str:
        """Pattern without its slashes."""
        return self._terminal(f"/{pattern}/")

    def any_until(
        self,
        text: str,
        without: Sequence[str] = (),
        patterns: Sequence[str] = (ANY,),
        *,
        may_be_empty: bool = True,
    ) -> str:
        """Any text of all the patterns that holds none of `without`, and this one at its end, which
        is not in it before.

        `text` is not empty; if it has a marker, it begins with it. The patterns have no slash;
        may_be_empty: what is before `text`, as far as they let it.
        """
        body = " & ".join(f"/{pattern}/" for pattern in patterns) + self._but(without)
        if any(text.startswith(marker) for marker in self._special_ids):
            before = self._terminal(f"/(?s:.+)/ & {body}")
            return f"{f'({before})?' if may_be_empty else before} {self.text(text)}"
        return self._rule(f"[suffix={json.dumps(text)}]: {body}")

    def any_without(self, *texts: str, pattern: str = "(?s:.+)") -> str:
        """Any text of the pattern (of one that is not empty), that holds none of these."""
        return self._terminal(f"/{pattern}/" + self._but(texts))

    def _but(self, texts: Sequence[str]) -> str:
        """Special tokens are no text, so none holds them."""
        return "".join(
            f" & ~/(?s:.*{pattern_of(text)}.*)/" for text in texts if text not in self._special_ids
        )

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
