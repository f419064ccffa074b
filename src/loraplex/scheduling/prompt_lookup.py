"""Prompt lookup: draft tokens for speculative decoding from a sequence's own text.

If the last few tokens occurred before, the tokens that followed them then may follow again (Saxena,
2023, "Prompt Lookup Decoding"). One step verifies all draft tokens of a sequence together. Draft
tokens change no output, only how many tokens a step adds.
"""

from collections.abc import Sequence

FIRST_PAUSE = 8
"""Tokens without a draft after MAX_MISSES drafts in a row without an accepted token."""
LAST_PAUSE = 128
MAX_MISSES = 2


class NgramIndex:
    """Index of the last place of each run of 1 to max_ngram tokens in a growing text.

    Every token is indexed once: a look-up costs max_ngram dictionary reads, however long the text.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        """Number of tokens before which all runs that end there are indexed."""

    def propose(self, token_ids: Sequence[int], num_wanted: int) -> tuple[int, ...]:
        """Return num_wanted tokens that may follow the text, or none.

        The text must continue that of the previous call. The longest of its endings that occurred
        before counts, at its last place. A draft that reaches the text's end continues with
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
        """Index all runs but those that end with the text: nothing follows them yet."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


class DraftPace:
    """Adapts the length of drafts, up to max_tokens, to how many tokens were accepted.

    After a draft that was accepted as a whole the next one may be 2 tokens longer; otherwise it has
    one token more than were accepted. After MAX_MISSES drafts in a row without an accepted token
    there is no draft for FIRST_PAUSE tokens, then one draft is tried. Each further miss doubles the
    pause, up to LAST_PAUSE. An accepted token ends this. Only tokens count, so the pace is the same
    in every run.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_wanted = max_tokens
        self._num_misses = 0
        self._resumes_at = 0

    def num_wanted(self, num_tokens: int) -> int:
        """Return the length of the next draft for a sequence that has num_tokens tokens."""
        return 0 if num_tokens < self._resumes_at else self._num_wanted

    def verified(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Note the lengths of a draft and of its accepted part; num_tokens: the sequence's now."""
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
    """Source of draft tokens of one sequence: its grammar, else repetitions in its text."""

    def __init__(self, num_draft_tokens: int, max_ngram: int) -> None:
        """num_draft_tokens: 0 leaves only the tokens that a grammar forces."""
        self._pace = DraftPace(num_draft_tokens) if num_draft_tokens else None
        self._index = NgramIndex(max_ngram)
        self._forced: tuple[int, ...] = ()
        self._is_from_text = False

    def force(self, token_ids: tuple[int, ...]) -> None:
        """Set the tokens that a grammar makes likely to come next; empty if there are none."""
        self._forced = token_ids

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return up to max_tokens draft tokens."""
        self._is_from_text = not self._forced
        if self._forced:
            return self._forced[:max_tokens]
        if self._pace is None:
            return ()
        num_wanted = min(max_tokens, self._pace.num_wanted(len(token_ids)))
        return self._index.propose(token_ids, num_wanted) if num_wanted > 0 else ()

    def verified(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Note how much of the last draft was accepted; num_tokens: the sequence's now."""
        if self._pace is not None and self._is_from_text:
            self._pace.verified(num_drafted, num_accepted, num_tokens)
