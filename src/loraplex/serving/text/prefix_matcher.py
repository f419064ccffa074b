"""Finding one sequence in a stream of items: characters of a text, or tokens."""

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class PrefixMatcher(Generic[T]):
    """Knuth, Morris and Pratt's search: constant work per item."""

    __slots__ = ("_fallbacks", "num_matched", "pattern")

    def __init__(self, pattern: Sequence[T]) -> None:
        """pattern: not empty."""
        self.pattern = pattern
        self.num_matched = 0
        """Length of the longest beginning of `pattern`, not all of it, that the stream ends
        with."""
        self._fallbacks = _fallbacks(pattern)

    def advance(self, item: T) -> bool:
        """Whether `pattern` is complete with this item."""
        state = _next_state(self.pattern, self._fallbacks, self.num_matched, item)
        is_complete = state == len(self.pattern)
        self.num_matched = self._fallbacks[-1] if is_complete else state
        return is_complete


def _fallbacks(pattern: Sequence[T]) -> list[int]:
    """Return for each length n >= 1, at n - 1, the longest beginning that also ends pattern[:n]."""
    table = [0]
    for item in pattern[1:]:
        table.append(_next_state(pattern, table, table[-1], item))
    return table


def _next_state(pattern: Sequence[T], fallbacks: Sequence[int], num_matched: int, item: T) -> int:
    while num_matched and pattern[num_matched] != item:
        num_matched = fallbacks[num_matched - 1]
    return num_matched + 1 if pattern[num_matched] == item else 0
