"""Beam search: which continuations go on, which are answers, and when it is over.

Pure arithmetic over candidates. It is the search of transformers 5 (generation/utils.py,
`_beam_search`): what is kept, what counts as an answer and when to stop agree with it in every
step. Equal scores go by the lowest index first: beams in their order, then a beam's candidates in
theirs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.output import TokenLogprob
from loraplex.scheduling.stop import Stop

Candidates = Sequence[tuple[int, float]]
"""(token id, log probability) of what may follow one beam, most likely first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of an answer that goes on."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """The sum over its tokens."""
    scores: tuple[TokenLogprob, ...] = ()
    """One per token. The probabilities are those that the search counts: after penalties."""


class Hypothesis(NamedTuple):
    """A whole answer."""

    beam: Beam
    score: float
    """beam.logprob / number of tokens ** length penalty."""
    stop: Stop


@dataclasses.dataclass(frozen=True, slots=True)
class _Continuation:
    parent: int
    beam: Beam
    stop: Stop | None
    rank: float
    """By which continuations are ordered: the log probability, less the diversity penalty."""


class BeamSearcher:
    """The search of one request: feed `advance` with candidates until `is_over`."""

    def __init__(
        self,
        params: BeamSearch,
        *,
        max_tokens: int,
        num_stop_tokens: int,
        stop_of: Callable[[Sequence[int]], Stop | None],
        num_top: int = 0,
    ) -> None:
        """max_tokens: new tokens of an answer at most; num_stop_tokens: how many may end one.

        stop_of: why an output ends with its last token, or None. num_top: most likely tokens that
        each of `Beam.scores` lists.
        """
        self._params = params
        self._max_tokens = max_tokens
        self._stop_of = stop_of
        self._num_top = num_top
        # So many that enough are left to go on when every likeliest one is an end.
        self._num_kept = max(2, 1 + num_stop_tokens) * params.width
        self._beams = [Beam()]
        self._hypotheses: list[Hypothesis] = []
        self._is_over = False

    @property
    def width(self) -> int:
        return self._params.width

    @property
    def num_candidates(self) -> int:
        """How many `advance` needs of each beam, if there are so many."""
        return max(self._num_kept, self._num_top)

    @property
    def beams(self) -> Sequence[Beam]:
        """Those that go on: 1 at first, then up to the width, the best first."""
        return self._beams

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The answers so far, the best first: at most the width."""
        return self._hypotheses

    @property
    def is_over(self) -> bool:
        """No more candidates are wanted."""
        return self._is_over

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """One token for every beam. candidates: of each of `beams`, in their order.

        Returns which of the old beams each of the new ones continues.
        """
        assert not self._is_over, "the search is over"
        kept = self._best_continuations(candidates)
        self._take_hypotheses(kept[: self._params.width])
        running = [c for c in kept if c.stop is None][: self._params.width]
        self._beams = [c.beam for c in running]
        self._is_over = not running or self._is_settled()
        return [c.parent for c in running]

    def _best_continuations(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        """As many as are kept, of all beams together."""
        pairs = zip(self._beams, candidates, strict=True)
        ranked = [
            (beam.logprob + logprob - self._params.diversity_rate * i, parent, i)
            for parent, (beam, of_beam) in enumerate(pairs)
            for i, (_, logprob) in enumerate(of_beam)
        ]
        ranked.sort(key=lambda entry: -entry[0])
        return [
            self._continuation(rank, parent, i, candidates[parent])
            for rank, parent, i in ranked[: self._num_kept]
        ]

    def _continuation(
        self, rank: float, parent: int, index: int, of_beam: Candidates
    ) -> _Continuation:
        token_id, logprob = of_beam[index]
        before = self._beams[parent]
        score = TokenLogprob(token_id, logprob, index + 1, tuple(of_beam[: self._num_top]))
        token_ids = (*before.token_ids, token_id)
        beam = Beam(token_ids, before.logprob + logprob, (*before.scores, score))
        return _Continuation(parent, beam, self._stop_of(token_ids), rank)

    def _take_hypotheses(self, best: Sequence[_Continuation]) -> None:
        """Of the best continuations, as many as there are beams, those that end are answers."""
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
        """Could no beam become one of the answers any more? (transformers' heuristics)"""
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
