"""A request in the scheduler, its sequences, and the conditions under which they end."""

import collections.abc
import dataclasses
import enum
from typing import NamedTuple

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    LoraplexError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from loraplex.core.image import ImageSpan, images_in, images_problem
from loraplex.core.output import FinishReason, LogitsFile, RequestTiming, TokenLogprob
from loraplex.core.plan import (
    CacheGroupId,
    Capacity,
    EncodeImage,
    RotationBorder,
    RowResult,
    RowStep,
    Slot,
)
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate, Task
from loraplex.memory.block_tables import BlockCounts, BlockTables
from loraplex.memory.image_cells import ImageCell, ImageKey
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.memory.kv_salt import image_salts, salt_with_input
from loraplex.scheduling.prompt_lookup import Drafter


class Stop(NamedTuple):
    """The end of a sequence."""

    reason: FinishReason
    stop_token_id: int | None = None
    """None if a token sequence or a length ended it."""


class StopRules:
    """End tokens, stop tokens, stop token sequences and length limits of one request.

    Serving finds stop strings.
    """

    def __init__(self, request: EngineRequest, max_model_len: int) -> None:
        sampling = request.sampling
        ends = () if sampling.ignore_eos else request.eos_token_ids
        self._stop_token_ids = frozenset((*ends, *sampling.stop_token_ids))
        runs = sampling.stop_token_sequences
        self._runs_of_one = frozenset(run[0] for run in runs if len(run) == 1)
        self._stop_runs = tuple(run for run in runs if len(run) > 1)
        self.grammar_end_ids = request.eos_token_ids if sampling.grammar is not None else ()
        """End tokens that come only where the grammar may end. They end the sequence even before
        min_tokens and with ignore_eos, because nothing else could follow."""
        self._min_tokens = sampling.min_tokens
        num_left = max_model_len - len(request.prompt_token_ids)
        self.max_tokens = (
            num_left if sampling.max_tokens is None else min(sampling.max_tokens, num_left)
        )
        """Maximum number of new tokens, by the request and the model's length."""

    @property
    def num_stop_tokens(self) -> int:
        """Number of distinct tokens each of which ends a sequence."""
        return len(self._stop_token_ids | self._runs_of_one)

    @property
    def suppressed_token_ids(self) -> tuple[int, ...]:
        """Tokens that must not be sampled before there are min_tokens tokens."""
        if not self._min_tokens:
            return ()
        return tuple(sorted(self._stop_token_ids.difference(self.grammar_end_ids)))

    def after(
        self, token_ids: collections.abc.Sequence[int], num_prompt_tokens: int
    ) -> Stop | None:
        """Return why a sequence ends with its last token; None if it continues.

        A stop token counts as an output token, but it may come only after min_tokens others. A
        stop token sequence lies entirely in the output, and ends it whenever it comes, as a stop
        string does: min_tokens restricts the model, not the client.
        """
        token_id = token_ids[-1]
        num_output_tokens = len(token_ids) - num_prompt_tokens
        if token_id in self.grammar_end_ids or token_id in self._runs_of_one:
            return Stop(FinishReason.STOP, token_id)
        if num_output_tokens > self._min_tokens and token_id in self._stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
        for run in self._stop_runs:
            if len(run) <= num_output_tokens and tuple(token_ids[-len(run) :]) == run:
                return Stop(FinishReason.STOP)
        if num_output_tokens >= self.max_tokens:
            return Stop(FinishReason.LENGTH)
        return None


OrderKey = tuple[int, ...]
"""Place of a sequence in the scheduling order: (priority, arrival time, request id, index).

Smaller is sooner. The key is unique in an engine and never changes while the sequence lives. So
the first sequence is never preempted and always makes progress; then the next one is the first.
A preempted sequence keeps its key and comes before those that were admitted after it.
"""

ShareKey = tuple[int | str, ...]
"""Fair share that a request draws on: adapter handles, a tenant, both, or nothing."""


class Span(NamedTuple):
    """Positions first .. end - 1 of a prompt."""

    first: int
    end: int


class EngineLimits(NamedTuple):
    """What an engine can compute: a request that exceeds it is refused."""

    capacity: Capacity
    kv: KVBlocks
    settings: SchedulerSettings
    fits_longest: bool
    """Whether the KV blocks suffice for one sequence of the model's length, and so for any shorter
    one, in steps of `max_step_tokens`."""


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

    The methods below are what depends on how the sequences relate and on the task: BeamRequest and
    PoolRequest override them.
    """

    engine_request: EngineRequest
    adapters: tuple[tuple[AdapterHandle, float], ...]
    """(handle, scale) of each adapter; empty for the base model."""
    stop_rules: StopRules
    handles: tuple[AdapterHandle, ...] = dataclasses.field(init=False)
    """Distinct adapters, sorted."""
    kv_salt: bytes = dataclasses.field(init=False)
    """Salt of the KV blocks: that of the wire, and the encoder's input."""
    num_encoder_tokens: int = dataclasses.field(init=False)
    """Length of the encoder's input."""
    request_id: RequestId = dataclasses.field(init=False)
    arrival_ns: int = dataclasses.field(init=False)
    images: tuple[ImageSpan, ...] = dataclasses.field(init=False)
    sequences: list["Sequence"] = dataclasses.field(default_factory=list)
    held_back: list["Sequence"] = dataclasses.field(default_factory=list)
    """Sequences that wait until the first one has computed the shared prompt, or until others have
    ended, so that one request does not take all slots."""
    max_unheld: int = 1
    """Maximum number of unfinished sequences that are not held back."""
    num_unfinished: int = 0
    whole_spans: tuple[Span, ...] = ()
    """Positions that one step computes together, as far as they are not computed; ascending."""
    max_step_tokens: int = 1
    """Maximum number of its tokens in one step: that of all rows, or of its longest whole span."""
    takes_hits: bool = True
    """Whether the prefix cache may serve the beginning of its prompt."""
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
        request = self.engine_request
        self.request_id, self.arrival_ns = request.request_id, request.arrival_ns
        self.images = request.images
        self.num_encoder_tokens = len(request.encoder_token_ids)
        self.kv_salt = request.kv_salt
        if self.num_encoder_tokens:
            self.kv_salt = salt_with_input(request.kv_salt, request.encoder_token_ids)

    @property
    def sampling(self) -> SamplingParams:
        return self.engine_request.sampling

    @property
    def num_slots(self) -> int:
        """Slots that one admission takes."""
        return 1

    @property
    def donor(self) -> "Sequence | None":
        """Sequence with a slot, whose blocks of the encoder's positions others can share."""
        if not self.num_encoder_tokens:
            return None
        return next((sequence for sequence in self.sequences if sequence.block_tables), None)

    def num_to_encode_if_admitted(self, sequence: "Sequence") -> int:
        """Return how many tokens a waiting sequence would have to encode if it took a slot now."""
        if sequence.offloaded is not None or self.donor is not None:
            return 0
        return self.num_encoder_tokens

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that an admission leaves for the next tokens of the sequences."""
        return 0

    @property
    def longest_span(self) -> int:
        """Number of positions of the longest whole span; 0: there is none."""
        return max((span.end - span.first for span in self.whole_spans), default=0)

    @property
    def max_least_tokens(self) -> int:
        """Tokens that a step must have at most for a row of it to compute anything."""
        if not self.images:
            return max(1, self.longest_span)
        spans = [*self.whole_spans, *(Span(image.first, image.first + 1) for image in self.images)]
        return max(
            span.end - span.first + sum(image.num_tokens for image in images_in(self.images, *span))
            for span in spans
        )

    def image_key(self, image: ImageSpan) -> ImageKey:
        return self.engine_request.image_salt, image.digest

    def input_refusal(
        self, capacity: Capacity, settings: SchedulerSettings
    ) -> LoraplexError | None:
        """Return why the images or a whole span of the prompt could never be computed."""
        images, served = self.images, capacity.images
        if images and served is None:
            return UnsupportedFeatureError(
                f"this model reads no images; the request has {len(images)}", param="images"
            )
        if images and served is not None:
            prompt = self.engine_request.prompt_token_ids
            problem = images_problem(images, prompt, served.placeholder_id, served.max_tokens)
            if problem is not None:
                return InvalidRequestError(problem, param="images")
            if len(images) > served.num_cells:
                return InvalidParameterError(
                    f"the request has {len(images)} images; at most {served.num_cells} are allowed",
                    param="images",
                )
        if self.max_least_tokens <= settings.max_num_batched_tokens:
            return None
        return PromptTooLongError(
            f"{self.max_least_tokens} tokens of the prompt and its images must be computed in one "
            f"step; a step has at most {settings.max_num_batched_tokens} (max_num_batched_tokens)"
        )

    def encoder_refusal(
        self, capacity: Capacity, settings: SchedulerSettings
    ) -> LoraplexError | None:
        """Return why the encoder's input, or the lack of one, could never be computed."""
        num_tokens, longest = self.num_encoder_tokens, capacity.longest_encoder_input
        if not longest:
            return UnsupportedFeatureError(
                f"encoder_token_ids has {num_tokens} tokens, but this model has no encoder: send "
                "them as the prompt",
                param="encoder_token_ids",
            )
        if not num_tokens:
            return InvalidRequestError("the encoder's input has no tokens; at least one is needed")
        # One step computes the input and the first token of the prompt, or its whole span.
        longest = min(longest, settings.max_num_batched_tokens - self.max_least_tokens)
        if num_tokens > longest:
            return PromptTooLongError(
                f"the encoder's input has {num_tokens} tokens; at most {longest} are allowed"
            )
        return None

    def refusal(self, limits: EngineLimits) -> LoraplexError | None:
        """Return why the request could never be computed to its end, even alone."""
        capacity, kv, settings, fits_longest = limits
        if self.num_encoder_tokens or capacity.longest_encoder_input:
            refusal = self.encoder_refusal(capacity, settings)
            if refusal is not None:
                return refusal
        if not capacity.generates:
            reason = "its checkpoint has no output layer"
            if not capacity.is_causal:
                reason = "its positions read later ones"
            return UnsupportedFeatureError(
                f"this model generates no text: {reason}; it gives vectors of texts "
                "(/v1/embeddings, LLM.embed)",
                param="model",
            )
        num_prompt_tokens = len(self.engine_request.prompt_token_ids)
        max_model_len, max_tokens = capacity.max_model_len, self.stop_rules.max_tokens
        if num_prompt_tokens >= max_model_len:
            return PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens; the model's length is {max_model_len} "
                "tokens, prompt and output together, so a prompt may have at most "
                f"{max_model_len - 1}"
            )
        sampling = self.engine_request.sampling
        returns_logits = sampling.return_logits or sampling.return_prompt_logits
        if returns_logits and not capacity.returns_logits:
            return InvalidParameterError(
                "this server divides the layers of the model between processes "
                "(pipeline_parallel_size), and returns no logits; logprobs are returned",
                param="return_logits" if sampling.return_logits else "return_prompt_logits",
            )
        # Only a whole span makes a step longer than in the settings.
        is_sure = fits_longest and not self.whole_spans
        shortage = None if is_sure else kv.shortage(Request.max_blocks(self, kv))
        if shortage is not None:
            return PromptTooLongError(
                f"{self._encoder_input}{num_prompt_tokens} prompt tokens and up to {max_tokens} "
                f"new ones need {shortage}"
            )
        if self.images or self.whole_spans:
            return self.input_refusal(capacity, settings)
        return None

    @property
    def _encoder_input(self) -> str:
        """The beginning of the text of an error about blocks."""
        num_tokens = self.num_encoder_tokens
        return f"{num_tokens} tokens of the encoder's input, " if num_tokens else ""

    def max_blocks(self, kv: KVBlocks) -> BlockCounts:
        """Return the maximum number of blocks that one admission ever holds at once."""
        # The last token is never computed: it needs no block.
        num_tokens = len(self.engine_request.prompt_token_ids) + self.stop_rules.max_tokens - 1
        return kv.max_blocks_held(num_tokens, self.max_step_tokens, self.num_encoder_tokens)

    def scheduled_with(self, sequence: "Sequence") -> list["Sequence"]:
        """Return the sequences that gain and lose their slots together with this one."""
        return [sequence]

    def num_blocks_held(self, sequence: "Sequence", cache_group: CacheGroupId) -> int:
        """Return the number of distinct blocks of the sequences that share this one's fate."""
        return len(sequence.block_tables[cache_group]) if sequence.block_tables else 0

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
    def num_logprobs(self) -> int | None:
        """Number of log probabilities that a row which samples returns; None: none."""
        return self.sampling.logprobs

    def row_task(self, sequence: "Sequence") -> Task:
        """Return the task of the row of a sequence."""
        return Generate(
            self.sampling,
            seed=sequence.seed,
            suppressed_token_ids=self.stop_rules.suppressed_token_ids,
            end_token_ids=self.stop_rules.grammar_end_ids,
        )

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
    image_cells: dict[int, ImageCell] = dataclasses.field(default_factory=dict)
    """Cells of the images that it has yet to compute positions of, by their first position."""
    num_hashed_blocks: int = 0
    """Leading full blocks that the prefix cache already has."""
    input_to_encode: int = 0
    """Tokens of the encoder's input to compute in the step of its next tokens: all or 0."""
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
    def num_least_tokens(self) -> int:
        """Tokens of a step without which the sequence computes nothing.

        1, unless it is at a whole span, or at an image that is to be encoded. Before it has a slot,
        it is not known where it begins: then the largest of all counts.
        """
        request, start = self.request, self.num_computed_tokens
        if self.slot is None:
            return request.max_least_tokens
        end = next((end for first, end in request.whole_spans if first <= start < end), start + 1)
        return end - start + self.num_to_encode(end - start)

    def num_to_encode(self, num_tokens: int) -> int:
        """Return how many tokens of images the step that computes so many must encode."""
        return sum(len_of for len_of, _ in self._encodes(num_tokens)) if self.image_cells else 0

    def encode(self, num_tokens: int) -> tuple[EncodeImage, ...]:
        """Return what a step that computes so many tokens encodes first; later ones need not."""
        found = []
        for _, cell in self._encodes(num_tokens):
            cell.is_filled = True
            found.append(EncodeImage(cell.key[1], cell.cell_id))
        return tuple(found)

    def _encodes(self, num_tokens: int) -> list[tuple[int, ImageCell]]:
        start = self.num_computed_tokens
        empty = {
            cell.cell_id: (image.num_tokens, cell)
            for image in images_in(self.request.images, start, start + num_tokens)
            if not (cell := self.image_cells[image.first]).is_filled
        }
        return list(empty.values())

    def num_fitting_tokens(self, num_tokens: int, max_tokens: int) -> int:
        """Return how many of the next num_tokens tokens a step with max_tokens left computes.

        What it must encode for them is part of max_tokens. No whole span is cut. One that the next
        token begins, or is inside of, is not limited by num_tokens.
        """
        start = self.num_computed_tokens
        num_tokens = self._num_with_images(min(num_tokens, max_tokens), max_tokens)
        for first, end in self.request.whole_spans:
            if first <= start < end and num_tokens < end - start:
                num_whole = end - start
                return num_whole if num_whole + self.num_to_encode(num_whole) <= max_tokens else 0
            if start < first < start + num_tokens < end:
                return first - start
        return num_tokens

    def _num_with_images(self, num_tokens: int, max_tokens: int) -> int:
        """Return how many of num_tokens tokens a step can compute after encoding their images."""
        if not self.image_cells:
            return num_tokens
        start = self.num_computed_tokens
        for image in images_in(self.request.images, start, start + num_tokens):
            num_before = max(0, image.first - start)
            if num_before >= num_tokens:
                break
            num_left = max_tokens - self.num_to_encode(num_before + 1)
            if num_left <= num_before:
                return num_before
            num_tokens = min(num_tokens, num_left)
        return num_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the newest token is all that the sequence has to compute.

        For beams, the first one that has a slot stands for all.
        """
        return self.request.is_decoding(self)

    @property
    def kv_salt(self) -> bytes:
        """Salt of its KV blocks: KV of another rotation is other KV."""
        salt = self.request.kv_salt
        length = self.rotation_length
        return salt + length.to_bytes(8, "little") if length else salt

    @property
    def later_salts(self) -> tuple[tuple[int, bytes], ...]:
        """(first position, salt) of the blocks from each image on: their KV depends on it."""
        images = self.request.images
        return image_salts(self.kv_salt, images) if images else ()

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
        self.input_to_encode = 0

    def check(self, *, runs: bool) -> None:
        """Assert the invariants of an unfinished sequence that has a slot, or has none."""
        expected = SequenceStatus.RUNNING if runs else SequenceStatus.WAITING
        assert self.status is expected, self
        assert (self.slot is not None) == runs, self
        assert self.num_uncomputed_tokens > 0, self
        if runs:
            assert self.offloaded is None, self
            assert not self.input_to_encode, "it has a slot, and did not encode"
        else:
            assert not self.num_blocks_reserved, self
            assert not self.block_tables, self
            assert not self.image_cells, self
            assert self.num_computed_tokens == 0, self
