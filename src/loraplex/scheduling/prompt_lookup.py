"""What is likely to follow a sequence's newest token: guesses that one step verifies together.

Prompt lookup: when the last few tokens came before, what followed them then may follow again
(Saxena, 2023, "Prompt Lookup Decoding"). A guess changes no token, only how many a step makes.
"""

from collections.abc import Sequence

FIRST_PAUSE = 8
"""Tokens without a guess after MAX_MISSES guesses in a row of which no token was right."""
LAST_PAUSE = 128
MAX_MISSES = 2


class NgramIndex:
    """Where each run of 1 to max_ngram tokens of a growing text came last, and what followed.

    Every token is indexed once: a look-up costs max_ngram dictionary reads, however long the text.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        """Runs that end before so many tokens are in."""

    def propose(self, token_ids: Sequence[int], num_wanted: int) -> tuple[int, ...]:
        """num_wanted tokens that may follow the text, or none.

        The text is the one of the call before, with more tokens. The longest of its endings that
        came before counts, where it came last. A guess that reaches the text's end goes on with
        itself: a text that repeats a period goes on repeating it.
        """
        self._index(token_ids)
        num_tokens = len(token_ids)
        for size in range(min(self._max_ngram, num_tokens), 0, -1):
            end = self._ends.get(tuple(token_ids[num_tokens - size :]))
            if end is not None:
                period = token_ids[end:]
                return tuple(period[i % len(period)] for i in range(num_wanted))
        return ()

    def _index(self, token_ids: Sequence[int]) -> None:
        """All runs but those that end with the text: nothing follows them yet."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


class DraftPace:
    """How many tokens to guess, by how the last guesses went: at most max_tokens.

    A guess that was right as a whole lets the next one be 2 tokens longer; else the next one has
    one token more than were right. After MAX_MISSES guesses in a row without a right token nothing
    is guessed for FIRST_PAUSE tokens, then one guess is tried; each further miss doubles the pause,
    up to LAST_PAUSE. A right token ends this. Only tokens count, so it is the same in every run.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_wanted = max_tokens
        self._num_misses = 0
        self._resumes_at = 0

    def num_wanted(self, num_tokens: int) -> int:
        """Of a sequence with so many tokens, how many to guess now."""
        return 0 if num_tokens < self._resumes_at else self._num_wanted

    def verified(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """A guess was that long and so far right; the sequence has num_tokens tokens now."""
        if num_accepted == num_drafted:
            self._num_wanted = min(self._max_tokens, num_drafted + 2)
        else:
            self._num_wanted = min(self._max_tokens, num_accepted + 1)
        if num_accepted:
            self._num_misses = 0
            return
        self._num_misses += 1
        if self._num_misses >= MAX_MISSES:
            doublings = self._num_misses - MAX_MISSES
            self._resumes_at = num_tokens + min(LAST_PAUSE, FIRST_PAUSE << min(doublings, 16))


class Drafter:
    """The guesses of one sequence: what its grammar forces, else what its text repeats."""

    def __init__(self, num_draft_tokens: int, max_ngram: int) -> None:
        """num_draft_tokens: 0 leaves only what a grammar forces."""
        self._pace = DraftPace(num_draft_tokens) if num_draft_tokens else None
        self._index = NgramIndex(max_ngram)
        self._forced: tuple[int, ...] = ()
        self._is_from_text = False

    def force(self, token_ids: tuple[int, ...]) -> None:
        """What a grammar makes likely to come next; empty: it does not know."""
        self._forced = token_ids

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """At most max_tokens tokens that may follow."""
        self._is_from_text = not self._forced
        if self._forced:
            return self._forced[:max_tokens]
        if self._pace is None:
            return ()
        num_wanted = min(max_tokens, self._pace.num_wanted(len(token_ids)))
        return self._index.propose(token_ids, num_wanted) if num_wanted > 0 else ()

    def verified(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """How right the last proposal was; the sequence has num_tokens tokens now."""
        if self._pace is not None and self._is_from_text:
            self._pace.verified(num_drafted, num_accepted, num_tokens)
