"""A request in the scheduler, and its sequences."""

import dataclasses
import enum

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import InvalidParameterError, LoraplexError, PromptTooLongError
from loraplex.core.output import FinishReason, LogitsFile, RequestTiming, TokenLogprob
from loraplex.core.plan import Capacity, KVGroupId, RotationBorder, RowResult, RowStep, Slot
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.memory.block_tables import BlockCounts, BlockTables
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.prompt_lookup import Drafter
from loraplex.scheduling.stop import StopRules

OrderKey = tuple[int, ...]
"""Place of a sequence in the scheduling order: (priority, arrival time, request id, index).

Smaller is sooner. The key is unique in an engine and never changes while the sequence lives. So
the first sequence is never preempted and always makes progress; then the next one is the first.
A preempted sequence keeps its key and comes before those that were admitted after it.
"""

ShareKey = tuple[int | str, ...]
"""Fair share that a request draws on: adapter handles, a tenant, both, or nothing."""


class SequenceStatus(enum.StrEnum):
    """State of a sequence."""

    WAITING = "waiting"
    """Needs a slot, blocks, or an adapter on the device. A preempted sequence waits again."""
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request from its acceptance to its last output. Its sequences advance independently.

    The methods below are what depends on how the sequences relate; BeamRequest overrides them.
    """

    engine_request: EngineRequest
    adapters: tuple[tuple[AdapterHandle, float], ...]
    """(handle, scale) of each adapter; empty for the base model."""
    stop_rules: StopRules
    handles: tuple[AdapterHandle, ...] = dataclasses.field(init=False)
    """Distinct adapters, sorted."""
    sequences: list["Sequence"] = dataclasses.field(default_factory=list)
    held_back: list["Sequence"] = dataclasses.field(default_factory=list)
    """Sequences that wait until the first one has computed the shared prompt, or until others have
    ended, so that one request does not take all slots."""
    max_unheld: int = 1
    """Maximum number of unfinished sequences that are not held back."""
    num_unfinished: int = 0
    rotation_border: RotationBorder | None = None
    share: ShareKey = ()
    was_scheduled: bool = False
    adapters_blocked_since_ns: int | None = None
    """Time since which the request is passed over because its adapters do not fit."""
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    """Log probabilities of prompt tokens 1, 2, ... as far as they are computed."""
    prompt_logits: list[LogitsFile] = dataclasses.field(default_factory=list)
    """Logits of prompt tokens 0, 1, ... as far as they are computed."""
    wants_prompt_scores: bool = False
    """Prompt log probabilities or logits were requested and are not complete."""
    num_cached_tokens: int = 0
    """Tokens that the prefix cache had at the first admission."""
    adapter_ready_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    adapter_load_ns: int = 0
    adapter_copy_ns: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_step: int = 0
    last_step: int = 0

    def __post_init__(self) -> None:
        self.handles = tuple(sorted({handle for handle, _ in self.adapters}))

    @property
    def request_id(self) -> int:
        return self.engine_request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.engine_request.sampling

    @property
    def arrival_ns(self) -> int:
        return self.engine_request.arrival_ns

    @property
    def num_slots(self) -> int:
        """Slots that one admission takes."""
        return 1

    @property
    def num_unheld(self) -> int:
        """Unfinished sequences that run or wait for a slot."""
        return self.num_unfinished - len(self.held_back)

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that an admission leaves for the next tokens of the sequences."""
        return 0

    def refusal(
        self, capacity: Capacity, kv: KVBlocks, settings: SchedulerSettings
    ) -> LoraplexError | None:
        """Return why the request could never be computed to its end, even alone."""
        num_prompt_tokens = len(self.engine_request.prompt_token_ids)
        max_model_len, max_tokens = capacity.max_model_len, self.stop_rules.max_tokens
        if num_prompt_tokens >= max_model_len:
            return PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens; the model's length is {max_model_len} "
                "tokens, prompt and output together, so a prompt may have at most "
                f"{max_model_len - 1}"
            )
        if self._returns_logits and not capacity.returns_logits:
            return InvalidParameterError(
                "this server divides the layers of the model between processes "
                "(pipeline_parallel_size), and returns no logits; logprobs are returned",
                param="return_logits" if self.sampling.return_logits else "return_prompt_logits",
            )
        shortage = kv.shortage(Request.max_blocks(self, kv, settings.max_step_tokens))
        if shortage is not None:
            return PromptTooLongError(
                f"{num_prompt_tokens} prompt tokens and up to {max_tokens} new ones need {shortage}"
            )
        return None

    @property
    def _returns_logits(self) -> bool:
        return self.sampling.return_logits or self.sampling.return_prompt_logits

    def max_blocks(self, kv: KVBlocks, max_step_tokens: int) -> BlockCounts:
        """Return the maximum number of blocks that one admission ever holds at once."""
        # The last token is never computed: it needs no block.
        num_tokens = len(self.engine_request.prompt_token_ids) + self.stop_rules.max_tokens - 1
        return kv.max_blocks_held(num_tokens, max_step_tokens)

    def scheduled_with(self, sequence: "Sequence") -> list["Sequence"]:
        """Return the sequences that gain and lose their slots together with this one."""
        return [sequence]

    def num_blocks_held(self, sequence: "Sequence", kv_group: KVGroupId) -> int:
        """Return the number of distinct blocks of the sequences that share this one's fate."""
        return len(sequence.block_tables[kv_group]) if sequence.block_tables else 0

    def num_computable_tokens(self, sequence: "Sequence") -> int:
        """Return how many tokens the sequence may compute in the next step by itself."""
        return 0 if sequence.is_left_out else sequence.num_uncomputed_tokens

    def is_decoding(self, sequence: "Sequence") -> bool:
        """Return whether the newest token is all that the sequence has to compute."""
        return sequence.num_uncomputed_tokens == 1 and not sequence.is_left_out

    def can_project(self, sequence: "Sequence", row: RowStep) -> bool:
        """Return whether an in-flight row computes exactly the tokens that follow.

        Then a later step can be planned before the result of this one is known.
        """
        if row.start + row.num_tokens < sequence.num_tokens:
            return True
        if self.sampling.return_logits:
            return False  # the logits of a row that is computed in vain would never be read
        num_left = self.stop_rules.max_tokens - sequence.num_output_tokens
        return sequence.drafter is None and num_left > 1 and sequence.num_tokens_to_border != 0

    def complete_row(self, sequence: "Sequence", row: RowStep) -> RowStep:  # noqa: ARG002
        """Return the row of a plan with what the relation of the sequences adds."""
        return row

    def has_sample(self, result: RowResult) -> bool:
        """Return whether the result of a row that samples has what it must have."""
        return bool(result.token_ids)

    @property
    def can_offload(self) -> bool:
        """Whether the KV of a preempted sequence may be kept on the host.

        Prompt scores need every position computed again, so a copy would be useless.
        """
        return not self.wants_prompt_scores

    def timing(self) -> RequestTiming:
        """Return the times and counts so far."""
        return RequestTiming(
            arrival_ns=self.arrival_ns,
            adapter_ready_ns=self.adapter_ready_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            num_preemptions=sum(sequence.num_preemptions for sequence in self.sequences),
            num_cached_tokens=self.num_cached_tokens,
            adapter_load_ns=self.adapter_load_ns,
            adapter_copy_ns=self.adapter_copy_ns,
            num_output_tokens=max(sequence.num_output_tokens for sequence in self.sequences),
            num_restarts=self.engine_request.num_restarts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            first_step=self.first_step,
            last_step=self.last_step,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OffloadedKV:
    """KV of a sequence in host memory."""

    host_tables: BlockTables
    num_computed_tokens: int


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One generation: `num_computed_tokens` catches up with `num_tokens`, and nothing else.

    Chunked prefill, prefix hits, resumption after a preemption and replay after a crash are all
    this one rule.
    """

    request: Request
    sequence_id: int
    index: int
    """Position in its request."""
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    key: OrderKey = dataclasses.field(init=False)
    drafter: Drafter | None = None
    """Source of draft tokens; None if there are none."""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens that came from the prefix cache at the last admission; part of the computed ones."""
    block_tables: BlockTables = dataclasses.field(default_factory=list)
    num_hashed_blocks: int = 0
    """Leading full blocks that the prefix cache already has."""
    slot: Slot | None = None
    num_tokens_at_admission: int = 0
    num_blocks_reserved: BlockCounts = ()
    """Blocks reserved for this sequence and not taken yet; for beams, on the first of them."""
    offloaded: OffloadedKV | None = None
    """KV kept on the host while the sequence waits after a preemption."""
    scores_prompt: bool = False
    """This sequence computes the prompt log probabilities of its request."""
    num_pending_steps: int = 0
    """Number of in-flight steps with a row of this sequence."""
    is_left_out: bool = False
    """Set while a plan is made that the sequence takes no part in (`projection`)."""
    num_preemptions: int = 0
    rotation_length: int = 0
    """Length for which its first positions are rotated since its last admission (ADR 32)."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        request = self.request.engine_request
        self.key = (request.priority, request.arrival_ns, request.request_id, self.index)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_computable_tokens(self) -> int:
        """Tokens that the sequence may compute in the next step by itself."""
        return self.request.num_computable_tokens(self)

    @property
    def is_decoding(self) -> bool:
        """Whether the newest token is all that the sequence has to compute.

        For beams, the first one that has a slot stands for all.
        """
        return self.request.is_decoding(self)

    @property
    def kv_salt(self) -> bytes:
        """Salt of its KV blocks: KV of another rotation is other KV."""
        salt = self.request.engine_request.kv_salt
        length = self.rotation_length
        return salt + length.to_bytes(8, "little") if length else salt

    @property
    def num_tokens_to_border(self) -> int | None:
        """How many tokens it may gain before all of it has to be computed again; None: any."""
        border = self.request.rotation_border
        if border is None or not border.recomputes or self.rotation_length:
            return None
        return border.length - self.num_tokens

    @property
    def is_outgrown(self) -> bool:
        """Whether what it has computed is rotated for another length than its next token."""
        num_left = self.num_tokens_to_border
        return num_left is not None and num_left < 0

    def set_rotation_length(self) -> None:
        """Fix the rotation length for the next admission."""
        border = self.request.rotation_border
        if border is not None:
            self.rotation_length = border.rotation_length(self.num_prompt_tokens, self.num_tokens)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def has_sampled(self) -> bool:
        """Whether the runner knows the newest token, because this row sampled it."""
        return len(self.token_ids) > self.num_tokens_at_admission

    def set_status(self, status: SequenceStatus) -> None:
        """Change the status along TRANSITIONS."""
        assert status in TRANSITIONS[self.status], f"{self.status} -> {status}"
        self.status = status

    def forget_blocks(self) -> None:
        """Clear the block tables and what is computed in them."""
        self.block_tables = []
        self.num_computed_tokens = 0
        self.num_hashed_blocks = 0

    def check(self, *, runs: bool) -> None:
        """Assert the invariants of an unfinished sequence that has a slot, or has none."""
        expected = SequenceStatus.RUNNING if runs else SequenceStatus.WAITING
        assert self.status is expected, self
        assert (self.slot is not None) == runs, self
        assert self.num_uncomputed_tokens > 0, self
        if runs:
            assert self.offloaded is None, self
        else:
            assert not self.num_blocks_reserved, self
            assert not self.block_tables, self
            assert self.num_computed_tokens == 0, self
