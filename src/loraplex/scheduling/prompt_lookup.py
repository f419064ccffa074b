"""Prompt lookup: draft tokens for speculative decoding from a sequence's own text.

If the last few tokens occurred before, the tokens that followed them then may follow again (Saxena,
2023, "Prompt Lookup Decoding"). One step verifies all draft tokens of a sequence together. Draft
tokens change no output, only how many tokens a step adds.
"""

import itertools
from collections.abc import Sequence

FIRST_PAUSE = 8
"""Tokens without a draft after MAX_MISSES drafts in a row without an accepted token."""
LAST_PAUSE = 128
MAX_MISSES = 2
FIRST_ACCEPTED = 4
"""Accepted draft tokens that a sequence begins with, so that the first miss changes little."""
RECENT_TOKENS = 32
"""Number of draft tokens that count fully for the share that is accepted; older ones count half."""


class NgramIndex:
    """Index of the last place of each run of 1 to max_ngram tokens in part of a text.

    A run belongs to the part that it ends in, and a place is the position after its end. Every
    token is indexed once, in calls that each have a limit.
    """

    def __init__(self, max_ngram: int, start: int) -> None:
        """start: first position after the end of an indexed run, at least 1."""
        self._max_ngram = max_ngram
        self._next_end = start
        self._ends: dict[tuple[int, ...], int] = {}

    def index(self, token_ids: Sequence[int], stop: int, max_tokens: int) -> int:
        """Index the runs that end before stop, max_tokens places at most; return how many."""
        first, last = self._next_end, min(stop, self._next_end + max_tokens)
        if first >= last:
            return 0
        for size in range(1, min(self._max_ngram + 1, last)):
            ends = range(max(first, size), last)
            columns = [token_ids[ends.start - size + i : last - size + i] for i in range(size)]
            # The dictionary takes the runs from iterators of C: a loop here is 5 times slower.
            self._ends.update(zip(zip(*columns, strict=True), ends, strict=True))
        self._next_end = last
        return last - first

    def is_whole(self, stop: int) -> bool:
        """Return whether all runs that end before stop are indexed."""
        return self._next_end >= stop

    def find(self, run: tuple[int, ...]) -> int | None:
        """Return the last place of a run; None if it did not occur."""
        return self._ends.get(run)


class PromptIndex:
    """Index of the last tokens of a prompt, shared by all sequences of its request."""

    def __init__(self, num_prompt_tokens: int, max_ngram: int, window: int) -> None:
        """window: number of last tokens of the prompt that drafts are looked up in."""
        self.num_prompt_tokens = num_prompt_tokens
        self.max_ngram = max_ngram
        self.ngrams = NgramIndex(max_ngram, max(1, num_prompt_tokens - window))


class DraftPace:
    """Adapts the length of drafts, up to max_tokens, to how many tokens were accepted.

    After a draft that was accepted as a whole the next one may be 2 tokens longer; otherwise it has
    one token more than were accepted. After MAX_MISSES drafts in a row without an accepted token
    there is no draft for FIRST_PAUSE tokens, then one draft is tried. Each further miss doubles the
    pause, up to LAST_PAUSE. An accepted token ends this. Where the share of draft tokens that were
    accepted is less than a step needs, there is one draft in LAST_PAUSE tokens. Only tokens count,
    so the same inputs give the same plans again.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_wanted = max_tokens
        self._num_misses = 0
        self._resumes_at = 0
        self._num_drafted = FIRST_ACCEPTED
        self._num_accepted = FIRST_ACCEPTED
        self._verified_at = 0

    def num_wanted(self, num_tokens: int, needed_share: float = 0.0) -> int:
        """Return the length of the next draft for a sequence that has num_tokens tokens.

        needed_share: of the draft tokens that must be accepted for a draft to gain time.
        """
        is_poor = self._num_accepted < needed_share * self._num_drafted
        pause_ends_at = self._verified_at + LAST_PAUSE if is_poor else self._resumes_at
        return 0 if num_tokens < pause_ends_at else self._num_wanted

    def verified(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Note the lengths of a draft and of its accepted part; num_tokens: the sequence's now."""
        if self._num_drafted >= RECENT_TOKENS:
            self._num_drafted //= 2
            self._num_accepted //= 2
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        self._verified_at = num_tokens
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

    def __init__(self, num_draft_tokens: int, prompt: PromptIndex) -> None:
        """num_draft_tokens: 0 leaves only the tokens that a grammar forces."""
        self._pace = DraftPace(num_draft_tokens) if num_draft_tokens else None
        self._prompt = prompt
        # A run that ends with the prompt is the first one here: what follows it is an output.
        self._output = NgramIndex(prompt.max_ngram, max(1, prompt.num_prompt_tokens))
        self._forced: tuple[int, ...] = ()
        self._is_from_text = False

    def force(self, token_ids: tuple[int, ...]) -> None:
        """Set the tokens that a grammar makes likely to come next; empty if there are none."""
        self._forced = token_ids

    def index(self, token_ids: Sequence[int], max_tokens: int, needed_share: float = 0.0) -> int:
        """Index at most max_tokens more tokens of the sequence; return how many.

        None during a pause: they wait for its end. needed_share: that of `propose`. The tokens must
        continue those of the previous call.
        """
        if self._pace is None or not self._pace.num_wanted(len(token_ids), needed_share):
            return 0
        num_prompt_tokens = self._prompt.num_prompt_tokens
        num_of_prompt = self._prompt.ngrams.index(token_ids, num_prompt_tokens, max_tokens)
        # Nothing follows the run that ends with the text yet.
        num_of_output = self._output.index(token_ids, len(token_ids), max_tokens - num_of_prompt)
        return num_of_prompt + num_of_output

    def propose(
        self, token_ids: Sequence[int], max_tokens: int, needed_share: float = 0.0
    ) -> tuple[int, ...]:
        """Return up to max_tokens draft tokens; none from a text that is not indexed whole.

        needed_share: see DraftPace.num_wanted. What a grammar forces is always accepted.
        """
        self._is_from_text = not self._forced
        if self._forced:
            return self._forced[:max_tokens]
        if self._pace is None:
            return ()
        num_wanted = min(max_tokens, self._pace.num_wanted(len(token_ids), needed_share))
        return self._look_up(token_ids, num_wanted) if num_wanted > 0 else ()

    def verified(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Note how much of the last draft was accepted; num_tokens: the sequence's now."""
        if self._pace is not None and self._is_from_text:
            self._pace.verified(num_drafted, num_accepted, num_tokens)

    def _look_up(self, token_ids: Sequence[int], num_wanted: int) -> tuple[int, ...]:
        """Return num_wanted tokens that may follow the text, or none.

        The longest of its endings that occurred before counts, at its last place. A draft that
        reaches the text's end continues with itself: a text that repeats a period goes on
        repeating it.
        """
        prompt, output, num_tokens = self._prompt, self._output, len(token_ids)
        if not (output.is_whole(num_tokens) and prompt.ngrams.is_whole(prompt.num_prompt_tokens)):
            return ()
        for size in range(min(prompt.max_ngram, num_tokens), 0, -1):
            run = tuple(token_ids[num_tokens - size :])
            end = output.find(run) or prompt.ngrams.find(run)
            if end is not None:
                # Only so many: a copy of the text from an early place on would be long.
                period = token_ids[end : end + num_wanted]
                return tuple(itertools.islice(itertools.cycle(period), num_wanted))
        return ()
