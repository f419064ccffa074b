"""What the scheduler remembers about a request and its sequences while they live."""

import dataclasses

from loraplex.core.adapter import AdapterHandle
from loraplex.core.output import RequestTiming, TokenLogprob
from loraplex.core.sequence import Sequence, SequenceGroup, SequenceStatus
from loraplex.scheduling.policy import OrderKey
from loraplex.scheduling.stop import StopRules


@dataclasses.dataclass(slots=True, eq=False)
class ActiveRequest:
    """A SequenceGroup that was accepted and has not ended. Only the roster and absorb write it."""

    group: SequenceGroup
    handles: tuple[AdapterHandle, ...]
    """Its distinct adapters, sorted; empty is the base model."""
    stop_rules: StopRules
    sequences: list["ActiveSequence"] = dataclasses.field(default_factory=list)
    held_back: list["ActiveSequence"] = dataclasses.field(default_factory=list)
    """Wait for the first one to compute the prompt that they share."""
    lacks_room_since_ns: int | None = None
    """Since when it is passed over because its adapters lack room."""
    prompt_scores: list[TokenLogprob] = dataclasses.field(default_factory=list)
    """Log probabilities of prompt tokens 1, 2, ... as far as they are computed."""
    wants_prompt_scores: bool = False
    """Until they are complete."""
    num_cached_tokens: int = 0
    """Served by the prefix cache at the first admission."""
    was_scheduled: bool = False
    num_unfinished: int = 0

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
        )


@dataclasses.dataclass(slots=True, eq=False)
class ActiveSequence:
    """A sequence of an ActiveRequest."""

    request: ActiveRequest
    sequence: Sequence
    key: OrderKey
    num_tokens_at_admission: int = 0
    scores_prompt: bool = False
    """This one computes the request's prompt log probabilities."""

    @property
    def is_finished(self) -> bool:
        return self.sequence.status is SequenceStatus.FINISHED

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
        if not runs:
            assert not sequence.block_ids, sequence
            assert sequence.num_computed_tokens == 0, sequence
