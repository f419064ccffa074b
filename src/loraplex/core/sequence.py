"""One generation in progress, and its request. Only the scheduler writes them."""

import dataclasses
import enum

from loraplex.core.adapter import AdapterHandle
from loraplex.core.output import FinishReason
from loraplex.core.plan import BlockId, Slot
from loraplex.core.request import EngineRequest


class SequenceStatus(enum.StrEnum):
    WAITING = "waiting"
    """Wants a slot, blocks, or an adapter on the device. A preempted sequence waits again."""
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A sequence has `num_computed_tokens` catching up with `num_tokens`, and nothing else.

    Chunked prefill, prefix hits, resumption after a preemption and replay after a crash are all
    this one rule.
    """

    sequence_id: int
    index: int
    """In its request."""
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the computed ones, how many came from the prefix cache at the last admission."""
    block_ids: list[BlockId] = dataclasses.field(default_factory=list)
    num_hashed_blocks: int = 0
    """Leading full blocks that the prefix cache already knows."""
    slot: Slot | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def become(self, status: SequenceStatus) -> None:
        """Change status along TRANSITIONS."""
        assert status in TRANSITIONS[self.status], f"{self.status} -> {status}"
        self.status = status


@dataclasses.dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request in the engine: its sequences share adapters, salt, limits and one final output."""

    request: EngineRequest
    sequences: list[Sequence]
    adapters: tuple[tuple[AdapterHandle, float], ...]
    adapter_ready_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    adapter_load_ns: int = 0
    adapter_copy_ns: int = 0

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)
