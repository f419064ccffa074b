"""The sequences of one beam search, and which of them computes which beam."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from loraplex.core.request import EngineRequest
from loraplex.scheduling.beams import BeamSearcher, Candidates
from loraplex.scheduling.stop import StopRules


class Fork(NamedTuple):
    """One sequence takes over what another one has; by their places in the request."""

    target: int
    source: int


@dataclasses.dataclass(slots=True, eq=False)
class BeamGroup:
    """A search has as many sequences as it is wide. They take their slots together, compute their
    newest tokens in the same steps, and lose their slots together.

    There may be fewer beams than sequences (at first there is one): the others are idle, they hold
    a slot and no blocks.
    """

    search: BeamSearcher
    width: int
    holders: list[int]
    """Of each of search.beams, the sequence that computes it."""
    joining: set[int] = dataclasses.field(default_factory=set)
    """Sequences that took over another beam: their rows leave and join again."""
    unnamed: set[int] = dataclasses.field(default_factory=set)
    """Sequences of whose block tables the runner knows nothing yet."""
    candidates: dict[int, Candidates] = dataclasses.field(default_factory=dict)
    """What the step gave so far, by sequence."""

    def restart(self) -> None:
        """All sequences have lost their slots: the first ones hold the beams now."""
        self.holders = list(range(len(self.search.beams)))
        self.joining.clear()
        self.unnamed = set(self.holders)
        self.candidates.clear()

    def take(self, index: int, candidates: Candidates) -> bool:
        """What may follow the beam of a sequence; whether this is known of all beams now."""
        self.candidates[index] = candidates
        return len(self.candidates) == len(self.holders)

    def advance(self) -> list[Fork]:
        """One more token for each beam. A beam stays with its sequence where that is possible."""
        old = self.holders
        parents = self.search.advance([self.candidates[index] for index in old])
        self.candidates.clear()
        heirs: dict[int, int] = {}
        for beam, parent in enumerate(parents):
            heirs.setdefault(parent, beam)
        kept = {beam: old[parent] for parent, beam in heirs.items()}
        free = iter(sorted(set(range(self.width)) - set(kept.values())))
        self.holders = [kept[b] if b in kept else next(free) for b in range(len(parents))]
        forks = [
            Fork(holder, old[parent])
            for beam, (holder, parent) in enumerate(zip(self.holders, parents, strict=True))
            if beam not in kept
        ]
        targets = {fork.target for fork in forks}
        self.joining |= targets
        self.unnamed |= targets
        return forks

    @property
    def idle(self) -> Sequence[int]:
        """Sequences without a beam."""
        return sorted(set(range(self.width)) - set(self.holders))


def new_beam_group(request: EngineRequest, rules: StopRules) -> BeamGroup | None:
    """None for a request that does not search."""
    beam = request.sampling.beam
    if beam is None:
        return None
    search = BeamSearcher(
        beam,
        max_tokens=rules.max_tokens,
        num_stop_tokens=rules.num_stop_tokens,
        stop_of=lambda token_ids: rules.after_token_ids(token_ids, 0),
        num_top=request.sampling.logprobs or 0,
    )
    return BeamGroup(search, beam.width, [0])
