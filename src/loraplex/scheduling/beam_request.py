"""A request that uses beam search: which of its sequences computes which beam."""

import dataclasses
from typing import NamedTuple

import msgspec

from loraplex.core.errors import InvalidParameterError, LoraplexError, PromptTooLongError
from loraplex.core.plan import CacheGroupId, RowResult, RowStep
from loraplex.core.request import EngineRequest
from loraplex.memory.block_tables import BlockCounts
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.beams import BeamSearcher, Candidates
from loraplex.scheduling.request import EngineLimits, Request, Sequence, StopRules


class Fork(NamedTuple):
    """One sequence takes over the state of another one; both by their index."""

    target: int
    source: int


class Donor(NamedTuple):
    """The beam whose blocks another one shares, and how much of it must be computed first."""

    beam: int
    num_tokens: int


@dataclasses.dataclass(slots=True, eq=False)
class BeamRequest(Request):
    """A request with as many sequences as the beam width.

    The sequences take their slots together, compute their newest tokens in the same steps, and
    lose their slots together. There may be fewer beams than sequences (at first there is one). The
    other sequences are idle: they have a slot and no blocks.
    """

    search: BeamSearcher = dataclasses.field(init=False)
    holders: list[int] = dataclasses.field(default_factory=lambda: [0])
    """Index of the sequence that computes each of `search.beams`."""
    rejoining: set[int] = dataclasses.field(default_factory=set)
    """Sequences that took over another beam: their rows leave and join again."""
    unsent_tables: set[int] = dataclasses.field(default_factory=set)
    """Sequences whose block tables the runner does not have yet."""
    donors: dict[int, Donor] = dataclasses.field(default_factory=dict)
    """What each sequence but the first waits for before it computes what was preempted."""
    candidates: dict[int, Candidates] = dataclasses.field(default_factory=dict)
    """Results of the current step, by sequence."""
    num_tokens_at_start: int = 0
    """Length of the beams when they last took their slots."""
    last_turn: int = 0
    """Number of the last step in which the beams had a turn, where they take turns."""

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        self.search = new_beam_searcher(self.engine_request, self.stop_rules)

    @property
    def width(self) -> int:
        return self.search.width

    @property
    def num_slots(self) -> int:
        return self.width

    @property
    def num_spare_blocks(self) -> int:
        return self.width

    @property
    def idle(self) -> list[int]:
        """Sequences without a beam."""
        return sorted(set(range(self.width)) - set(self.holders))

    @property
    def can_offload(self) -> bool:
        # Beams share blocks, and the host table of a sequence cannot express that.
        return False

    def refusal(self, limits: EngineLimits) -> LoraplexError | None:
        capacity, kv, settings, _ = limits
        refusal = Request.refusal(self, limits)
        if refusal is not None:
            return refusal
        if self.width > capacity.max_num_seqs:
            return InvalidParameterError(
                f"the beam width ({self.width}) must not exceed the {capacity.max_num_seqs} "
                "sequences that run at the same time (max_num_seqs)",
                param="beam_width",
            )
        if self.adapters and 0 < settings.max_seqs_per_adapter < self.width:
            return InvalidParameterError(
                f"the beam width ({self.width}) must not exceed the "
                f"{settings.max_seqs_per_adapter} sequences with one adapter that run at the same "
                "time (max_seqs_per_adapter)",
                param="beam_width",
            )
        shortage = kv.shortage(self.max_blocks(kv))
        if shortage is not None:
            return PromptTooLongError(
                f"{self._encoder_input}{self.width} beams of "
                f"{len(self.engine_request.prompt_token_ids)} prompt tokens and "
                f"up to {self.stop_rules.max_tokens} new ones need {shortage}"
            )
        return None

    def max_blocks(self, kv: KVBlocks) -> BlockCounts:
        num_of_one = Request.max_blocks(self, kv)
        num_prompt_tokens = len(self.engine_request.prompt_token_ids)
        num_tokens = num_prompt_tokens + self.stop_rules.max_tokens - 1
        # The beams share the full blocks of their prompt. With an attention window they may not,
        # and with states they do not when they come back from a preemption.
        num_full = 0 if kv.is_sparse else num_prompt_tokens - num_prompt_tokens % kv.block_size
        max_blocks = []
        for group, num_held in zip(kv.groups, num_of_one, strict=True):
            if group.is_sparse:
                max_blocks.append(self.width * num_held)
                continue
            num_shared = group.num_blocks_for(num_full, self.num_encoder_tokens)
            num_own = group.num_blocks_for(num_tokens, self.num_encoder_tokens) - num_shared
            num_blocks = num_shared + self.width * num_own
            max_blocks.append(
                max(num_blocks, self.width * num_held) if group.frees_early else num_blocks
            )
        return tuple(max_blocks)

    def scheduled_with(self, sequence: Sequence) -> list[Sequence]:  # noqa: ARG002
        return self.sequences

    def num_blocks_held(self, sequence: Sequence, cache_group: CacheGroupId) -> int:  # noqa: ARG002
        tables = [one.block_tables[cache_group] for one in self.sequences if one.block_tables]
        return len({block_id for table in tables for block_id in table})

    def num_computable_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens the sequence may compute in the next step by itself.

        Of preempted beams, each is computed again when the blocks that it shares are. The newest
        token of each waits until all beams can compute theirs.
        """
        if self.holders == [sequence.index]:
            return 0 if self._is_left_out else sequence.num_uncomputed_tokens
        is_late = sequence.index in self.holders and sequence.num_uncomputed_tokens > 1
        if not is_late or self._awaits_donor(sequence.index) or self._is_left_out:
            return 0
        return sequence.num_uncomputed_tokens - 1

    def is_decoding(self, sequence: Sequence) -> bool:
        if sequence.index != min(self.holders) or self._is_left_out:
            return False
        return all(self.sequences[index].num_uncomputed_tokens <= 1 for index in self.holders)

    def can_project(self, sequence: Sequence, row: RowStep) -> bool:  # noqa: ARG002
        return False  # the beam search decides which tokens follow

    def complete_row(self, sequence: Sequence, row: RowStep) -> RowStep:
        new_block_ids = row.new_block_ids
        if sequence.index in self.unsent_tables:
            self.unsent_tables.remove(sequence.index)
            new_block_ids = tuple(map(tuple, sequence.block_tables))
        stop = row.start + row.num_tokens
        samples = stop == sequence.num_tokens
        return msgspec.structs.replace(
            row,
            # The runner samples no token for a beam, so each step names its tokens.
            token_ids=tuple(sequence.token_ids[row.start : stop]),
            new_block_ids=new_block_ids,
            num_logprobs=None,
            num_candidates=self.search.num_candidates if samples else 0,
        )

    def has_sample(self, result: RowResult) -> bool:
        return bool(result.candidates)

    @property
    def may_give_way(self) -> bool:
        """Whether the beams may lose their slots to other shares.

        Beams that have lost them before gain a token first: what they compute again each time would
        otherwise be all that they ever compute.
        """
        has_gained = len(self.search.beams[0].token_ids) > self.num_tokens_at_start
        return has_gained or not self.sequences[0].num_preemptions

    def restart(self) -> None:
        """Assign the beams to the first sequences, after all have lost their slots."""
        self.num_tokens_at_start = len(self.search.beams[0].token_ids)
        self.holders = list(range(len(self.search.beams)))
        self.rejoining.clear()
        self.unsent_tables = set(self.holders)
        self.candidates.clear()
        self.donors.clear()
        self.assign_tokens()

    def assign_tokens(self) -> None:
        """Give every beam's tokens to the sequence that computes it."""
        prompt = self.engine_request.prompt_token_ids
        for sequence in self.sequences:
            sequence.token_ids = list(prompt)
        for index, beam in zip(self.holders, self.search.beams, strict=True):
            self.sequences[index].token_ids.extend(beam.token_ids)

    def take(self, index: int, candidates: Candidates) -> bool:
        """Keep the candidates of one sequence; return whether all beams have theirs now."""
        self.candidates[index] = candidates
        return len(self.candidates) == len(self.holders)

    def advance(self) -> list[Fork]:
        """Add one token to each beam. A beam stays with its sequence where that is possible."""
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
        self.rejoining |= targets
        self.unsent_tables |= targets
        return forks

    @property
    def _is_left_out(self) -> bool:
        return any(sequence.is_left_out for sequence in self.sequences)

    def _awaits_donor(self, index: int) -> bool:
        donor = self.donors.get(index)
        if donor is None:
            return False
        num_computed = self.sequences[donor.beam].num_computed_tokens
        return num_computed < donor.num_tokens or self._awaits_donor(donor.beam)


def new_beam_searcher(request: EngineRequest, rules: StopRules) -> BeamSearcher:
    """Return the beam search of a request that has beam parameters."""
    assert request.sampling.beam is not None, "the request uses no beam search"
    return BeamSearcher(
        request.sampling.beam,
        max_tokens=rules.max_tokens,
        num_stop_tokens=rules.num_stop_tokens,
        stop_of=lambda token_ids: rules.after(token_ids, 0),
        num_top=request.sampling.logprobs or 0,
    )
