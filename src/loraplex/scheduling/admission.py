"""Which requests are refused at once: those that can never fit, and those beyond the queue."""

from loraplex.core.errors import (
    InvalidParameterError,
    LoraplexError,
    PromptTooLongError,
    QueueFullError,
)
from loraplex.core.request import EngineRequest
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.stop import StopRules

FIRST_SERVICE_NS = 1_000_000_000
LAST_RETRY_SECONDS = 60.0
SMOOTHING = 0.2


def worst_case_blocks(
    request: EngineRequest, rules: StopRules, kv: KVBlocks, max_step_tokens: int
) -> int:
    """The most blocks that one sequence of a request, or all beams of a search, hold at once."""
    # The last token is never computed: it needs no room.
    num_tokens = len(request.prompt_token_ids) + rules.max_tokens - 1
    num_held = kv.max_blocks_held(num_tokens, max_step_tokens)
    if request.sampling.beam is None:
        return num_held
    width = request.sampling.beam.width
    # The beams share the full blocks of their prompt. With an attention window they may not.
    num_shared = len(request.prompt_token_ids) // kv.block_size
    num_blocks = num_shared + width * (kv.num_blocks_for(num_tokens) - num_shared)
    return max(num_blocks, width * num_held) if kv.has_window else num_blocks


def length_refusal(
    request: EngineRequest,
    rules: StopRules,
    max_model_len: int,
    kv: KVBlocks,
    max_step_tokens: int,
) -> LoraplexError | None:
    """Why the request could never be computed to its end, even alone."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens >= max_model_len:
        return PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens; the model's length is {max_model_len} "
            f"tokens, prompt and answer together, so a prompt may have at most {max_model_len - 1}"
        )
    # The last token is never computed: it needs no room.
    num_blocks = kv.max_blocks_held(num_prompt_tokens + rules.max_tokens - 1, max_step_tokens)
    if num_blocks > kv.num_blocks:
        return PromptTooLongError(
            f"{num_prompt_tokens} prompt tokens and up to {rules.max_tokens} new ones need "
            f"{num_blocks} KV blocks of {kv.block_size} tokens; there are {kv.num_blocks}"
        )
    return None


def beam_refusal(
    request: EngineRequest,
    rules: StopRules,
    max_num_seqs: int,
    max_seqs_per_adapter: int,
    kv: KVBlocks,
    max_step_tokens: int,
) -> LoraplexError | None:
    """Why a beam search could never be computed, even alone. max_seqs_per_adapter 0: any."""
    beam = request.sampling.beam
    if beam is None:
        return None
    if beam.width > max_num_seqs:
        return InvalidParameterError(
            f"the beam width ({beam.width}) must not exceed the {max_num_seqs} sequences that run "
            "at the same time (max_num_seqs)",
            param="beam_width",
        )
    if request.adapters and 0 < max_seqs_per_adapter < beam.width:
        return InvalidParameterError(
            f"the beam width ({beam.width}) must not exceed the {max_seqs_per_adapter} sequences "
            "with one adapter that run at the same time (max_seqs_per_adapter)",
            param="beam_width",
        )
    num_blocks = worst_case_blocks(request, rules, kv, max_step_tokens)
    if num_blocks > kv.num_blocks:
        return PromptTooLongError(
            f"{beam.width} beams of {len(request.prompt_token_ids)} prompt tokens and up to "
            f"{rules.max_tokens} new ones need {num_blocks} KV blocks of {kv.block_size} tokens; "
            f"there are {kv.num_blocks}"
        )
    return None


class QueueBound:
    """How many requests may wait for a slot, and when to come again if they are too many."""

    def __init__(self, max_queue_size: int, max_num_seqs: int) -> None:
        self._max_queue_size = max_queue_size
        self._max_num_seqs = max_num_seqs
        self._num_queued = 0
        self._service_ns = float(FIRST_SERVICE_NS)

    def refusal(self, num_free_slots: int) -> LoraplexError | None:
        """Why one more request cannot wait. Those that free slots will take do not count."""
        if not self._max_queue_size:
            return None
        num_waiting = self._num_queued - num_free_slots
        if num_waiting < self._max_queue_size:
            return None
        waves = self._num_queued / self._max_num_seqs
        seconds = min(LAST_RETRY_SECONDS, max(1.0, waves * self._service_ns / 1e9))
        return QueueFullError(
            f"{num_waiting} requests wait already; the queue holds {self._max_queue_size}",
            retry_after_seconds=round(seconds, 1),
        )

    def enter(self) -> None:
        self._num_queued += 1

    def leave(self) -> None:
        """It was scheduled for the first time, or ended before."""
        self._num_queued -= 1

    def served(self, service_ns: int) -> None:
        """A request ended that long after it was scheduled first."""
        self._service_ns += SMOOTHING * (service_ns - self._service_ns)

    def check(self, num_queued: int) -> None:
        assert self._num_queued == num_queued
