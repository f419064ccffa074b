"""Which tokens may not come next because of those before them. Indices that grow with a row."""

from collections.abc import Iterable, Sequence


class NGramIndex:
    """What followed each run of n - 1 tokens, so that no run of n comes twice.

    As transformers' NoRepeatNGramLogitsProcessor, over prompt and output.
    """

    def __init__(self, size: int, token_ids: Sequence[int]) -> None:
        self._size = size
        self._following: dict[tuple[int, ...], list[int]] = {}
        self._tail: tuple[int, ...] = ()
        self.add(token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        """They came."""
        known = (*self._tail, *token_ids)
        for prefix, token_id in self._runs(known):
            self._following.setdefault(prefix, []).append(token_id)
        self._tail = self._last_of(known)

    def banned(self, then: Sequence[int]) -> list[int]:
        """What may not follow if `then` came, too; a token may be named twice."""
        known = (*self._tail, *then)
        prefix = self._last_of(known)
        if len(prefix) < self._size - 1:
            return []
        banned = self._following.get(prefix, [])
        if not then:
            return banned
        return [*banned, *(token_id for before, token_id in self._runs(known) if before == prefix)]

    def _runs(self, known: Sequence[int]) -> Iterable[tuple[tuple[int, ...], int]]:
        """The runs of n tokens whose last is new: the tail is one shorter than a run."""
        for *prefix, token_id in zip(*(known[i:] for i in range(self._size)), strict=False):
            yield tuple(prefix), token_id

    def _last_of(self, known: Sequence[int]) -> tuple[int, ...]:
        return tuple(known[max(0, len(known) - self._size + 1) :])


class BadWords:
    """Runs of tokens that are not to come: the last of a run is banned after the others.

    As transformers' NoBadWordsLogitsProcessor, over prompt and output; but an end token that is
    named alone is banned like any other.
    """

    def __init__(self, runs: Iterable[tuple[int, ...]], token_ids: Sequence[int]) -> None:
        self._always: list[int] = []
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *before, last in runs:
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))
            else:
                self._always.append(last)
        longest = max((len(b) for of in self._after.values() for b, _ in of), default=0)
        self._num_kept = longest
        self._tail: tuple[int, ...] = ()
        self.add(token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        """They came."""
        self._tail = self._tail_after(token_ids)

    def banned(self, then: Sequence[int]) -> list[int]:
        """What may not follow if `then` came, too; a token may be named twice."""
        tail = self._tail_after(then)
        candidates = self._after.get(tail[-1], []) if tail else []
        return [
            *self._always,
            *(last for before, last in candidates if tail[-len(before) :] == before),
        ]

    def _tail_after(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        known = (*self._tail, *token_ids[-self._num_kept :]) if self._num_kept else ()
        return known[max(0, len(known) - self._num_kept) :]
