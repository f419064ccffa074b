"""A text that comes in pieces, for code that reads it as if it were all there.

A reader is a generator: where it needs text that has not come it yields, and goes on once there is
more. What it does depends on characters only, never on how they came.
"""

import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that waits for text, and its result."""

WHITE_SPACE = " \t\r\n"


class TextSource:
    """The unread part of a text, and whether more will come."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_before = 0
        self._is_final = False
        self.is_cut = False
        """A limit ended the text, not its writer."""

    def feed(self, text: str, *, final: bool, is_cut: bool = False) -> None:
        self._text = self._text[self._at :] + text
        self._num_before += self._at
        self._at = 0
        self._is_final = final
        self.is_cut = is_cut

    @property
    def is_over(self) -> bool:
        """All of the text has come, and was read."""
        return self._is_final and self._at == len(self._text)

    @property
    def position(self) -> int:
        """Number of characters that were read."""
        return self._num_before + self._at

    @property
    def unread(self) -> str:
        return self._text[self._at :]

    def advance(self, count: int) -> str:
        """Read so many characters, which are there."""
        start, self._at = self._at, self._at + count
        return self._text[start : self._at]

    def peek(self, ahead: int = 0) -> Steps[str]:
        """The next character, or the one so many after it; empty if the text ends before."""
        while self._at + ahead >= len(self._text):
            if self._is_final:
                return ""
            yield
        return self._text[self._at + ahead]

    def visible(self, ahead: int) -> Steps[tuple[str, int]]:
        """The next character from there that is no white space, and how far ahead it is."""
        while (char := (yield from self.peek(ahead))) and char in WHITE_SPACE:
            ahead += 1
        return char, ahead

    def length_of(self, pattern: re.Pattern[str]) -> int:
        """Number of characters that are there and match, from the next one on."""
        match = pattern.match(self._text, self._at)
        return 0 if match is None else len(match[0])

    def starts_with(self, choices: Sequence[str], ahead: int = 0) -> Steps[str | None]:
        """Which of the texts comes next (`ahead`: so many characters on), the longest one; None if
        none does. Reads nothing."""
        longest = max(map(len, choices), default=0)
        while True:
            start = self._at + ahead
            there = self._text[start : start + longest]
            if self._is_final or not any(
                len(text) > len(there) and text.startswith(there) for text in choices
            ):
                matching = [text for text in choices if there.startswith(text)]
                return max(matching, key=len, default=None)
            yield

    def white_space(self) -> Steps[str]:
        """Read what there is of it."""
        taken = ""
        while (char := (yield from self.peek())) and char in WHITE_SPACE:
            taken += self.advance(1)
        return taken

    def pieces_until(
        self, markers: Sequence[str], give: Callable[[str], None]
    ) -> Steps[str | None]:
        """Read up to the marker that is next, and give what is before it, as it comes.

        The marker itself is not read; None: there is none, and all that is unread at the end of
        the text may begin one. No marker may lie within another.
        """
        while True:
            match = _any_of(tuple(markers)).search(self._text, self._at)
            if match is not None:
                give(self.advance(match.start() - self._at))
                return match[0]
            unread = self.unread
            give(self.advance(len(unread) - _num_pending(unread, markers)))
            if self._is_final:
                return None
            yield


def _num_pending(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text that may begin a marker."""
    longest = max(map(len, markers), default=0) - 1
    tail = text[-longest:] if longest > 0 else ""
    starts = (at for at, char in enumerate(tail) if any(m[0] == char for m in markers))
    for at in starts:
        if any(len(m) > len(tail) - at and m.startswith(tail[at:]) for m in markers):
            return len(tail) - at
    return 0


@functools.lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """One search for all of them; it finds nothing if there are none."""
    return re.compile("|".join(map(re.escape, markers)) if markers else r"(?!)")
