"""Beam search over candidates: which continuations go on, which are hypotheses, when it ends.

This is pure arithmetic. It follows transformers 5 (generation/utils.py, `_beam_search`) in every
step: which continuations are kept, which become hypotheses and when to stop. Equal scores go by the
lowest index first: beams in their order, then a beam's candidates in theirs.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.output import TokenLogprob
from loraplex.scheduling.request import Stop

Candidates = Sequence[tuple[int, float]]
"""(token id, log probability) of the tokens that may follow one beam, most likely first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beam:
    """A running output of beam search."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """Sum over its tokens."""
    scores: tuple[TokenLogprob, ...] = ()
    """One per token, with the probabilities that beam search uses: after penalties."""


class Hypothesis(NamedTuple):
    """A whole output of beam search."""

    beam: Beam
    score: float
    """beam.logprob / number of tokens ** length penalty."""
    stop: Stop


@dataclasses.dataclass(frozen=True, slots=True)
class _Continuation:
    parent: int
    beam: Beam
    stop: Stop | None


class BeamSearcher:
    """Beam search of one request: call `advance` with candidates until `is_over`."""

    def __init__(
        self,
        params: BeamSearch,
        *,
        max_tokens: int,
        num_stop_tokens: int,
        stop_of: Callable[[Sequence[int]], Stop | None],
        num_top: int = 0,
    ) -> None:
        """max_tokens: maximum number of new tokens; num_stop_tokens: number of tokens that end one.

        stop_of: returns why an output ends with its last token, or None. num_top: number of most
        likely tokens that each of `Beam.scores` lists.
        """
        self._params = params
        self._max_tokens = max_tokens
        self._stop_of = stop_of
        self._num_top = num_top
        # Enough continuations remain even if each beam's most likely ones are all stop tokens.
        self._num_kept = max(2, 1 + num_stop_tokens) * params.width
        self._beams = [Beam()]
        self._hypotheses: list[Hypothesis] = []
        self._is_over = False

    @property
    def width(self) -> int:
        return self._params.width

    @property
    def num_candidates(self) -> int:
        """Number of candidates that `advance` needs of each beam, if the vocabulary has as many."""
        return max(self._num_kept, self._num_top)

    @property
    def beams(self) -> Sequence[Beam]:
        """Running beams: 1 at first, then up to the width, the best first."""
        return self._beams

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """Best hypotheses so far, the best first; at most the width."""
        return self._hypotheses

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self._is_over

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """Add one token to every beam; return the old beam that each new one continues.

        candidates: one entry for each of `beams`, in their order.
        """
        assert not self._is_over, "the search is over"
        kept = self._best_continuations(candidates)
        self._take_hypotheses(kept[: self._params.width])
        running = [c for c in kept if c.stop is None][: self._params.width]
        self._beams = [c.beam for c in running]
        self._is_over = not running or self._is_settled()
        return [c.parent for c in running]

    def _best_continuations(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        """Return the best `_num_kept` continuations of all beams together."""

        def ranked(parent: int, beam: Beam) -> Iterator[tuple[float, int, int]]:
            for i, (_, logprob) in enumerate(candidates[parent]):
                yield -(beam.logprob + logprob - self._params.diversity_rate * i), parent, i

        # A beam's candidates are in the order of their rank, so most are never looked at.
        best = heapq.merge(*map(ranked, itertools.count(), self._beams))
        return [
            self._continuation(parent, i, candidates[parent])
            for _, parent, i in itertools.islice(best, self._num_kept)
        ]

    def _continuation(self, parent: int, index: int, of_beam: Candidates) -> _Continuation:
        token_id, logprob = of_beam[index]
        before = self._beams[parent]
        score = TokenLogprob(token_id, logprob, index + 1, tuple(of_beam[: self._num_top]))
        token_ids = (*before.token_ids, token_id)
        beam = Beam(token_ids, before.logprob + logprob, (*before.scores, score))
        return _Continuation(parent, beam, self._stop_of(token_ids))

    def _take_hypotheses(self, best: Sequence[_Continuation]) -> None:
        """Add the continuations that end, among the best `width`, to the hypotheses."""
        width = self._params.width
        is_full = len(self._hypotheses) == width
        if is_full and self._params.early_stopping is EarlyStopping.AT_ONCE:
            return
        ended = [
            Hypothesis(c.beam, self._score(c.beam.logprob, len(c.beam.token_ids)), c.stop)
            for c in best
            if c.stop is not None
        ]
        merged = sorted([*self._hypotheses, *ended], key=lambda hypothesis: -hypothesis.score)
        self._hypotheses = merged[:width]

    def _is_settled(self) -> bool:
        """Return whether no beam can become a hypothesis any more (transformers' heuristics)."""
        if len(self._hypotheses) < self._params.width:
            return False
        early = self._params.early_stopping
        if early is EarlyStopping.AT_ONCE:
            return True
        num_tokens = len(self._beams[0].token_ids)
        if early is EarlyStopping.NEVER and self._params.length_penalty > 0:
            num_tokens = self._max_tokens
        best = max(beam.logprob for beam in self._beams)
        return self._score(best, num_tokens) <= self._hypotheses[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        divisor: float = num_tokens**self._params.length_penalty
        return logprob / divisor
