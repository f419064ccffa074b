"""JSON as models write it, made valid as it comes.

Valid JSON stays as it is, to the character. What models often get wrong is repaired: escapes that
JSON has not (`\\d`), raw line breaks and quotes within strings, single quotes, Python's words and
numbers (`None`, `+5`), values without quotes, commas too many or too few, missing brackets.
A stream cannot take anything back, so all that follows the beginning of an object ends as one.
"""

import json
import re
from collections.abc import Callable
from typing import Final

from loraplex.serving.text.text_source import WHITE_SPACE, Steps, TextSource

MAX_DEPTH: Final = 128
"""Maximum depth of nested objects and arrays: any client can parse that."""
_MAX_AHEAD: Final = 512
"""Characters after a quote in which to look for signs that it ends its string."""
_MAX_WORD: Final = 64
"""Maximum length of a number without a comma after it."""

_PLAIN: Final = re.compile(r"[^\"'\\\x00-\x20\]}<\[`]+")
"""Text within a string that needs no look: markers begin with one of the last three."""
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LIKE_NUMBER: Final = re.compile(
    r"([+-]?)(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?((?:[eE][+-]?[0-9]+)?)"
)
_WORDS: Final = {
    "true": "true",
    "True": "true",
    "false": "false",
    "False": "false",
    "null": "null",
    "None": "null",
}
_CLOSING: Final = {"{": "}", "[": "]"}
_QUOTES: Final = ('"', "'")
_HEX: Final = frozenset("0123456789abcdefABCDEF")


class MalformedError(Exception):
    """The text is no call, or no longer one. Not an error of a request: the text is content."""


class CutError(MalformedError):
    """The text is over within what may be a call."""


class _EndError(Exception):
    """The object ends here: by a marker of its call, or with the text."""


def repaired_json(text: str) -> str | None:
    """Return the text of an object or array as valid JSON; None if it is neither."""
    source, given = TextSource(), list[str]()
    source.feed(text.strip(), final=True)
    reader = RepairingReader(source, source.advance, given.append)
    try:
        next(reader.read_value() if text.lstrip()[:1] == "[" else reader.read_object(), None)
    except MalformedError:
        return None
    return None if source.unread.strip(f"]}}{WHITE_SPACE}") else "".join(given)


def json_word(text: str) -> str | None:
    """Return the JSON of a word or number of JSON or Python; None if the text is neither."""
    if text in _WORDS or _NUMBER.fullmatch(text):
        return _WORDS.get(text, text)
    match = _LIKE_NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction, exponent = match.groups()
    start = "-" if sign == "-" else ""
    return f"{start}{whole.lstrip('0') or '0'}{f'.{fraction}' if fraction else ''}{exponent}"


def escaped(text: str) -> str:
    """Text of a string without its control characters, as models write line breaks."""
    return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], text)


class RepairingReader:
    """Reads one value from a source and gives out valid JSON for it.

    Raises CutError, and gives nothing more, where a limit cut the text.
    """

    def __init__(
        self,
        source: TextSource,
        take: Callable[[int], str],
        give: Callable[[str], None],
        *,
        begin: Callable[[], None] = lambda: None,
        markers: tuple[str, ...] = (),
        outer: str = "",
    ) -> None:
        """begin: called before the first text is given of what is known to be an object; markers:
        of the call, which end it; outer: brackets that will close what the value is in.
        """
        self._source = source
        self._take = take
        self._give_out = give
        self._begin = begin
        self._markers = markers
        self._firsts = frozenset(marker[0] for marker in markers)
        self._open = list(outer)
        """Closing brackets that are still to come, the next one last."""
        self._max_open = MAX_DEPTH + len(outer)
        self._string_end = 0
        """Position of the quote that ends the string, if a marker in it made it known."""
        self._held: list[str] | None = []
        """Output until the value has begun; None: it has."""

    def read_object(self) -> Steps[None]:
        """Raises MalformedError for what does not begin like an object: nothing was given then."""
        if (yield from self._source.peek()) != "{":
            raise CutError if self._source.is_over else MalformedError
        try:
            yield from self._container("{")
        except _EndError:
            if self._held is not None:
                raise CutError if self._source.is_over else MalformedError from None

    def read_value(self) -> Steps[None]:
        """Raises MalformedError for one that does not end."""
        self._release()
        try:
            yield from self._value((yield from self._token()))
        except _EndError:
            raise CutError if self._source.is_over else MalformedError from None

    def read_string(self, *, is_name: bool) -> Steps[None]:
        """is_name: it has no quotes in it, so the next one ends it."""
        self._release()
        if (yield from self._source.peek()) not in _QUOTES:
            raise CutError if self._source.is_over else MalformedError
        try:
            yield from self._string(is_key=is_name)
        except _EndError:
            raise CutError if self._source.is_over else MalformedError from None

    # ---------------------------------------------------------------- output

    def _give(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
        elif text:
            self._give_out(text)

    def _release(self) -> None:
        """The value has begun: nothing that follows can undo it."""
        if self._held is not None:
            held, self._held = self._held, None
            self._begin()
            self._give("".join(held))

    # ---------------------------------------------------------------- values

    def _container(self, opening: str) -> Steps[None]:
        closing = _CLOSING[opening]
        self._give(self._take(1))
        self._open.append(closing)
        before = ""
        """White space, and perhaps a comma, whose place in the output is not known yet."""
        num_items = 0
        owed = ""
        """Rest of the member that is being read."""
        try:
            while True:
                before += yield from self._space()
                char = yield from self._token()
                if char == ",":
                    comma = self._take(1)
                    before += comma if num_items and "," not in before else ""
                elif char in "]}":
                    if char == closing or char in self._open:
                        self._close(before, char)
                        return
                    self._take(1)
                else:
                    self._give(before if not num_items or "," in before else f",{before}")
                    before, num_items = "", num_items + 1
                    if closing == "}":
                        owed = ": null"
                        yield from self._key()
                        owed = "null"
                        char = yield from self._token()
                        self._release()
                    owed = ""
                    yield from self._value(char)
        except _EndError:
            self._give(owed + closing)
            self._open.pop()
            raise

    def _close(self, before: str, char: str) -> None:
        closing = self._open.pop()
        if char == closing:
            self._take(1)
        self._release()
        self._give(before.replace(",", "") + closing)

    def _key(self) -> Steps[None]:
        """Read a key, and all that is before its value."""
        if (yield from self._token()) in _QUOTES:
            yield from self._string(is_key=True)
        else:
            yield from self._bare(":,}]", as_key=True)
        self._give((yield from self._space()))
        if (yield from self._token()) == ":":
            self._give(self._take(1))
        elif self._held is not None:
            raise MalformedError
        else:
            self._give(":")
        self._give((yield from self._space()))

    def _value(self, char: str) -> Steps[None]:
        if char in _CLOSING and len(self._open) < self._max_open:
            yield from self._container(char)
        elif char in _QUOTES:
            yield from self._string(is_key=False)
        elif char in ",}]":
            self._give("null")
        else:
            yield from self._bare(",}]\n", as_key=False)

    def _bare(self, ends: str, *, as_key: bool) -> Steps[None]:
        """A word or number, or a text without quotes."""
        text = self._take(1)
        while (char := (yield from self._source.peek())) and char not in ends:
            is_short = len(text) < _MAX_WORD
            if char in _QUOTES and is_short and json_word(text.strip()) is not None:
                break  # of the next key: the comma is missing
            if char in self._firsts and (yield from self._source.starts_with(self._markers)):
                break
            text += self._take(1)
        if not char and self._source.is_cut:
            raise CutError
        word = text.rstrip(WHITE_SPACE)
        value = None if as_key else json_word(word)
        self._give((value or json.dumps(word, ensure_ascii=False)) + text[len(word) :])

    # ---------------------------------------------------------------- strings

    def _string(self, *, is_key: bool) -> Steps[None]:
        quote = self._take(1)
        self._give('"')
        held = ""
        """White space and brackets, which are none of the string if it does not end."""
        try:
            while True:
                length = self._source.length_of(_PLAIN)
                char = yield from self._source.peek()
                if length:
                    self._give(escaped(held) + self._take(length))
                    held = ""
                elif not char:
                    raise self._end()
                elif char in WHITE_SPACE or char in "]}":
                    held += self._take(1)
                elif char == quote and (is_key or (yield from self._closes(0))):
                    self._take(1)
                    self._give(escaped(held) + '"')
                    return
                elif (
                    char in self._firsts
                    and (marker := (yield from self._source.starts_with(self._markers)))
                    and (yield from self._is_end(len(marker), quote))
                ):
                    raise _EndError
                else:
                    text = yield from self._character(char)
                    self._give(escaped(held) + text)
                    held = ""
        except _EndError:
            self._give('"')
            raise

    def _character(self, char: str) -> Steps[str]:
        """Take a character or an escape; return it as JSON."""
        if char != "\\":
            self._take(1)
            return '\\"' if char == '"' else escaped(char)
        following = yield from self._source.peek(1)
        if not following:
            self._take(1)
            raise self._end()
        if following in '"\\/bfnrt':
            return self._take(2)
        if following == "'":
            return self._take(2)[1]
        if following == "u":
            digits = ""
            for ahead in range(2, 6):
                digits += yield from self._source.peek(ahead)
            if len(digits) < 4 and self._source.is_cut:
                raise self._end()
            if len(digits) == 4 and _HEX.issuperset(digits):
                return self._take(6)
        self._take(1)
        return "\\\\"

    def _closes(self, ahead: int) -> Steps[bool]:
        """Whether the quote there ends its string: what follows is what may follow a string."""
        start, left = ahead, list(self._open)
        char, ahead = yield from self._source.visible(ahead + 1)
        while char and char in "]}" and char in left:
            while left.pop() != char:
                pass
            char, ahead = yield from self._source.visible(ahead + 1)
        if not char or ahead - start > _MAX_AHEAD:
            return True
        if not left:
            return char not in _QUOTES
        if char in self._firsts and (yield from self._source.starts_with(self._markers, ahead)):
            return True
        if char != ",":
            # A comma may be missing before the next key.
            return (
                char in _QUOTES
                and left[-1] == "}"
                and (yield from self._is_key(ahead, if_cut=False))
            )
        char, ahead = yield from self._source.visible(ahead + 1)
        if left[-1] == "]":
            return not char or char in "\"'[]{+-.0123456789tfnTFN"
        return not char or char == "}" or (yield from self._is_key(ahead, if_cut=True))

    def _is_key(self, start: int, *, if_cut: bool) -> Steps[bool]:
        """Whether a key is there, and its colon; if_cut: what it is if the text ends within it."""
        quote = yield from self._source.peek(start)
        ahead = start + 1
        ends = quote if quote in _QUOTES else f":{WHITE_SPACE}"
        while (char := (yield from self._source.peek(ahead))) and char not in ends:
            ahead += 2 if char == "\\" else 1
            if ahead - start > _MAX_AHEAD:
                return True
        if not char:
            return if_cut
        char, _ = yield from self._source.visible(ahead + 1 if quote in _QUOTES else ahead)
        return char in ("", ":")

    def _is_end(self, ahead: int, quote: str) -> Steps[bool]:
        """Whether a marker within a string ends it: another marker or a call follows, or the text
        ends, or the string does not. `ahead`: the length of the marker.

        So a string may hold a marker, but no two in a row: a call without its last quote is more
        frequent.
        """
        num_markers = 1
        char, ahead = yield from self._source.visible(ahead)
        while marker := (yield from self._source.starts_with(self._markers, ahead)):
            num_markers += 1
            char, ahead = yield from self._source.visible(ahead + len(marker))
        if not char:
            raise self._end()
        if char == "{":
            # An example of a call within a string has its quotes escaped.
            return (yield from self._source.visible(ahead + 1))[0] != "\\"
        if num_markers > 1:
            return True
        if self._source.position < self._string_end:
            return False  # found before: a string of many markers is not searched for each
        while char := (yield from self._source.peek(ahead)):
            if char == quote and (yield from self._closes(ahead)):
                self._string_end = self._source.position + ahead
                return False
            ahead += 2 if char == "\\" else 1
        raise self._end()

    # ---------------------------------------------------------------- input

    def _space(self) -> Steps[str]:
        text = ""
        while (char := (yield from self._source.peek())) and char in WHITE_SPACE:
            text += self._take(1)
        return text

    def _token(self) -> Steps[str]:
        """The next character. Raises _EndError at a marker, and at the end of the text."""
        char = yield from self._source.peek()
        if not char:
            raise self._end()
        if char in self._firsts and (yield from self._source.starts_with(self._markers)):
            raise _EndError
        return char

    def _end(self) -> Exception:
        """What is raised where the text ends. A cut leaves nothing to read."""
        if not self._source.is_cut:
            return _EndError()
        self._take(len(self._source.unread))
        return CutError()
