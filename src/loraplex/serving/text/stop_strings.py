"""Where the text of one sequence has to end. It sees text only: no tokens, no requests."""

from collections.abc import Sequence

from loraplex.serving.text.prefix_matcher import PrefixMatcher


class StopStrings:
    """Cuts a text at the stop string that is complete first, however the text is split.

    "First" is as if the text came one character at a time, which is when a generation would have
    been stopped: with stops `abcd` and `bc`, the text `abcd` ends at its `c`. Of stops that end at
    the same character the longest counts. Text is held back only while it may still turn out to
    be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._matchers = [PrefixMatcher(stop) for stop in stops if stop]
        self._include_in_output = include_in_output
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, final: bool = False) -> tuple[str, str | None]:
        """(text to give out, stop string that ended it or None).

        After a match nothing more is given out. With `final`, text that was held back is.
        """
        if self._matched is not None:
            return "", self._matched
        held = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._matched = self._advance(char)
            if self._matched is not None:
                self._held = ""
                start = end - len(self._matched)
                return held[: end if self._include_in_output else start], self._matched
        num_held = 0 if final or self._include_in_output else self._num_pending()
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held], None

    def _advance(self, char: str) -> str | None:
        matches = [str(m.pattern) for m in self._matchers if m.advance(char)]
        return max(matches, key=len, default=None)

    def _num_pending(self) -> int:
        return max((matcher.num_matched for matcher in self._matchers), default=0)
