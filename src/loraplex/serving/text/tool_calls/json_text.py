"""Whether characters, one after another, are the JSON text of an object."""

import re
from typing import Final

MAX_DEPTH: Final = 128
"""Maximum depth of nested objects and arrays: any client can parse that."""

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_WORDS: Final = ("true", "false", "null")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_START: Final = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?)?((?<=[0-9])[eE]([+-]?[0-9]*))?")
_CLOSING: Final = {"{": "}", "[": "]"}
_ESCAPED: Final = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


class MalformedError(Exception):
    """The text is no call, or no longer one. Not an error of a request: the text is content."""


class CutError(MalformedError):
    """The text is over within what may be a call."""


class JsonScanner:
    """Reads one object. `feed` returns the output for a character.

    Strict JSON but for one thing: a control character within a string, as models write line
    breaks, is given out escaped.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expected = "value"
        """value, value or end, key, key or end, colon, comma or end."""
        self._is_in_string = False
        self._escape = ""
        """Characters read of an escape sequence: a backslash, or it and `u` and digits."""
        self._word = ""
        """Characters read of a number, true, false or null."""
        self.is_complete = False

    def scan(self, text: str, start: int) -> tuple[str, int]:
        """Read on from there: (what is given out, where the reading ended).

        It ends with the text, after the object, or before a character that cannot be.
        """
        given: list[str] = []
        at = start
        while at < len(text) and not self.is_complete:
            if self._is_in_string and not self._escape:
                match = _PLAIN.match(text, at)
                if match is not None:
                    given.append(match[0])
                    at = match.end()
                    continue
            try:
                given.append(self.feed(text[at]))
            except MalformedError:
                break
            at += 1
        return "".join(given), at

    @property
    def is_between(self) -> bool:
        """The last character ended a string, or is no part of one."""
        return not self._is_in_string

    def feed(self, char: str) -> str:
        """Raises MalformedError, and is then as it was before."""
        if self._is_in_string:
            return self._in_string(char)
        if self._word:
            if self._goes_on(self._word + char):
                self._word += char
                return char
            if self._word not in _WORDS and not _NUMBER.fullmatch(self._word):
                raise MalformedError
            # A failure below leaves the word as it was: it cannot be completed by another.
            self._between(char)
            self._word = ""
            return char
        self._between(char)
        return char

    def _goes_on(self, word: str) -> bool:
        return any(known.startswith(word) for known in _WORDS) or bool(
            _NUMBER_START.fullmatch(word)
        )

    def _in_string(self, char: str) -> str:
        if self._escape:
            self._in_escape(char)
        elif char == "\\":
            self._escape = char
        elif char == '"':
            self._is_in_string = False
        elif char < " ":
            return _ESCAPED.get(char, f"\\u{ord(char):04x}")
        return char

    def _in_escape(self, char: str) -> None:
        if self._escape == "\\":
            if char not in '"\\/bfnrtu':
                raise MalformedError
            self._escape = "\\u" if char == "u" else ""
        elif char not in "0123456789abcdefABCDEF":
            raise MalformedError
        else:
            self._escape = "" if len(self._escape) == 5 else self._escape + char

    def _between(self, char: str) -> None:
        """A character that is in no string, and no part of a word that goes on."""
        if char in " \t\r\n":
            return
        if self._expected == "colon":
            self._require(char == ":")
            self._expected = "value"
        elif self._expected == "comma or end":
            self._require(char == "," or self._closes(char))
            if char == ",":
                self._expected = "key" if self._open[-1] == "{" else "value"
            else:
                self._close()
        elif self._expected.endswith("or end") and self._closes(char):
            self._close()
        elif self._expected.startswith("key"):
            self._require(char == '"')
            self._is_in_string, self._expected = True, "colon"
        else:
            self._begin_value(char)

    def _begin_value(self, char: str) -> None:
        if char in _CLOSING:
            self._require(len(self._open) < MAX_DEPTH and (bool(self._open) or char == "{"))
            self._open.append(char)
            self._expected = "key or end" if char == "{" else "value or end"
            return
        self._require(bool(self._open))
        if char == '"':
            self._is_in_string = True
        else:
            self._require(self._goes_on(char))
            self._word = char
        self._expected = "comma or end"

    def _closes(self, char: str) -> bool:
        return char == _CLOSING[self._open[-1]]

    def _close(self) -> None:
        self._open.pop()
        self._expected = "comma or end"
        self.is_complete = not self._open

    def _require(self, is_right: bool) -> None:
        if not is_right:
            raise MalformedError
