"""What the scheduler remembers about a request and its sequences while they live."""

import dataclasses

from loraplex.core.adapter import AdapterHandle
from loraplex.core.output import LogitsFile, RequestTiming, TokenLogprob
from loraplex.core.plan import BlockId
from loraplex.core.sequence import Sequence, SequenceGroup, SequenceStatus
from loraplex.scheduling.beam_group import BeamGroup
from loraplex.scheduling.drafting import Drafter
from loraplex.scheduling.policy import OrderKey, ShareKey
from loraplex.scheduling.stop import StopRules


@dataclasses.dataclass(slots=True, eq=False)
class ActiveRequest:
    """A SequenceGroup that was accepted and has not ended. Only the roster and absorb write it."""

    group: SequenceGroup
    handles: tuple[AdapterHandle, ...]
    """Its distinct adapters, sorted; empty is the base model."""
    stop_rules: StopRules
    beams: BeamGroup | None = None
    """None: its sequences do not know each other."""
    sequences: list["ActiveSequence"] = dataclasses.field(default_factory=list)
    held_back: list["ActiveSequence"] = dataclasses.field(default_factory=list)
    """Wait for the first one to compute the prompt that they share."""
    lacks_room_since_ns: int | None = None
    """Since when it is passed over because its adapters lack room."""
    prompt_scores: list[TokenLogprob] = dataclasses.field(default_factory=list)
    """Log probabilities of prompt tokens 1, 2, ... as far as they are computed."""
    prompt_logits: list[LogitsFile] = dataclasses.field(default_factory=list)
    """Of prompt tokens 0, 1, ... as far as they are computed."""
    wants_prompt_scores: bool = False
    """Log probabilities or logits, until they are complete."""
    num_cached_tokens: int = 0
    """Served by the prefix cache at the first admission."""
    share: ShareKey = ()
    """Whose share of the engine it uses."""
    was_scheduled: bool = False
    num_unfinished: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def request_id(self) -> int:
        return self.group.request_id

    @property
    def arrival_ns(self) -> int:
        return self.group.request.arrival_ns

    def timing(self) -> RequestTiming:
        group = self.group
        return RequestTiming(
            arrival_ns=self.arrival_ns,
            adapter_ready_ns=group.adapter_ready_ns,
            first_scheduled_ns=group.first_scheduled_ns,
            first_token_ns=group.first_token_ns,
            last_token_ns=group.last_token_ns,
            num_preemptions=sum(sequence.num_preemptions for sequence in group.sequences),
            num_cached_tokens=self.num_cached_tokens,
            adapter_load_ns=group.adapter_load_ns,
            adapter_copy_ns=group.adapter_copy_ns,
            num_output_tokens=max(sequence.num_output_tokens for sequence in group.sequences),
            num_restarts=group.request.num_restarts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OffloadedKV:
    """Where a sequence's KV is on the host, and of how many tokens."""

    host_block_ids: list[BlockId]
    num_computed_tokens: int


@dataclasses.dataclass(slots=True, eq=False)
class ActiveSequence:
    """A sequence of an ActiveRequest."""

    request: ActiveRequest
    sequence: Sequence
    key: OrderKey
    num_tokens_at_admission: int = 0
    num_blocks_to_take: int = 0
    """Reserved for it, while it runs."""
    offloaded: "OffloadedKV | None" = None
    """Its KV on the host, while it waits after a preemption."""
    scores_prompt: bool = False
    """This one computes the request's prompt log probabilities."""
    drafter: Drafter | None = None
    """None: nothing is guessed."""
    num_in_flight: int = 0
    """Plans that were launched with a row of it, and have not landed."""
    awaits_result: bool = False
    """While a plan is made ahead: what it computes next is not certain yet."""

    @property
    def is_finished(self) -> bool:
        return self.sequence.status is SequenceStatus.FINISHED

    @property
    def num_computable_tokens(self) -> int:
        """How many of its tokens it may compute by itself now.

        Beams are computed again one after the other, as each needs blocks of those before it; the
        newest token of each waits until all can compute theirs.
        """
        beams, index = self.request.beams, self.sequence.index
        if beams is None:
            return 0 if self.awaits_result else self.sequence.num_uncomputed_tokens
        if self._search_awaits_result:
            return 0
        if beams.holders == [index]:
            return self.sequence.num_uncomputed_tokens
        late = self._late_beams(beams)
        return self.sequence.num_uncomputed_tokens - 1 if index in late[:1] else 0

    @property
    def decodes(self) -> bool:
        """Its newest token is all that it lacks. The first of several beams speaks for all."""
        beams = self.request.beams
        if beams is None:
            return self.sequence.num_uncomputed_tokens == 1 and not self.awaits_result
        if self._search_awaits_result:
            return False
        return self.sequence.index == min(beams.holders) and not self._late_beams(beams)

    @property
    def _search_awaits_result(self) -> bool:
        return any(active.awaits_result for active in self.request.sequences)

    def _late_beams(self, beams: BeamGroup) -> list[int]:
        sequences = self.request.sequences
        return [i for i in beams.holders if sequences[i].sequence.num_uncomputed_tokens > 1]

    @property
    def has_sampled(self) -> bool:
        """Has its row, since it took its slot, sampled a token that the runner still knows?"""
        return self.sequence.num_tokens > self.num_tokens_at_admission

    def check(self, *, runs: bool) -> None:
        """What holds for a sequence that is not finished, by whether it has a slot."""
        sequence = self.sequence
        expected = SequenceStatus.RUNNING if runs else SequenceStatus.WAITING
        assert sequence.status is expected, sequence
        assert (sequence.slot is not None) == runs, sequence
        assert sequence.num_uncomputed_tokens > 0, sequence
        assert self.offloaded is None or not runs, sequence
        if not runs:
            assert not self.num_blocks_to_take, sequence
            assert not sequence.block_ids, sequence
            assert sequence.num_computed_tokens == 0, sequence
