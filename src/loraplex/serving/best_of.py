"""Choice of the best of several completions of one prompt."""

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from loraplex.core.output import SequenceOutput


def best_first(outputs: Sequence[Sequence[float]]) -> list[int]:
    """Return indices of completions by the mean log probability of their tokens, highest first.

    OpenAI's best_of: of equals the one made first comes first; an empty output is last.
    """
    return sorted(range(len(outputs)), key=lambda index: -_mean(outputs[index]))


def _mean(logprobs: Sequence[float]) -> float:
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf


class BestOf:
    """Keeps the sequences of a request until all have ended: only then the best are known."""

    def __init__(self, num_made: int, num_returned: int, *, shows_logprobs: bool) -> None:
        """shows_logprobs: False if they are there for the choice alone."""
        self._num_made = num_made
        self._num_returned = num_returned
        self._shows_logprobs = shows_logprobs
        self._pieces: defaultdict[int, list[SequenceOutput]] = defaultdict(list)

    def add(self, piece: SequenceOutput) -> None:
        self._pieces[piece.index].append(piece)

    def best(self) -> tuple[SequenceOutput, ...]:
        """The returned ones, each whole, numbered by rank."""
        outputs = [joined(self._pieces[index]) for index in range(self._num_made)]
        order = best_first([[entry.logprob for entry in a.logprobs] for a in outputs])
        return tuple(
            self._ranked(outputs[index], rank)
            for rank, index in enumerate(order[: self._num_returned])
        )

    def _ranked(self, output: SequenceOutput, rank: int) -> SequenceOutput:
        return msgspec.structs.replace(
            output,
            index=rank,
            logprobs=output.logprobs if self._shows_logprobs else (),
            cumulative_logprob=math.fsum(entry.logprob for entry in output.logprobs),
        )


def joined(pieces: Sequence[SequenceOutput]) -> SequenceOutput:
    """The increments of one sequence as one."""
    if len(pieces) == 1:
        return pieces[0]
    return msgspec.structs.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        logits=tuple(logits for piece in pieces for logits in piece.logits),
    )
