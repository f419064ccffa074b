"""How the scheduler trades latency, throughput and fairness. Limits of memory are not here."""

import dataclasses
import enum

from loraplex.core.errors import ConfigError

DEFAULT_ADAPTER_AGING_NS = 2_000_000_000


class Batching(enum.StrEnum):
    """When sequences join (TensorRT-LLM's gpt_model_type)."""

    INFLIGHT = "inflight"
    """Any step may let sequences join, and each leaves when it ends."""
    STATIC = "static"
    """V1: a batch is formed and runs to the end of all its requests; then comes the next."""


class BatchSchedulerPolicy(enum.StrEnum):
    """Which sequences are let in as long as KV blocks are left."""

    MAX_UTILIZATION = "max_utilization"
    """As many as have room now. If blocks run out later, the youngest is preempted."""
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    """As many as have room for their longest possible answer: nothing is ever preempted."""


class FairShare(enum.StrEnum):
    """Between whom waiting requests are served alike (FairShares)."""

    NONE = "none"
    """First come, first served."""
    ADAPTER = "adapter"
    """Sets of adapters; the base model is one."""
    TENANT = "tenant"
    TENANT_ADAPTER = "tenant_adapter"


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits of one plan and of the queue."""

    max_num_batched_tokens: int = 512
    """Tokens that one step computes at most, over all rows."""
    max_prefill_chunk: int | None = None
    """Tokens that one row computes at most in one step; None: as many as the step has room for."""
    shortest_prefill_share: float = 0.5
    """Of the tokens that a step has left for prompts, the part that goes to the shortest ones
    first, 0 to 1 (1 excluded); the rest goes to the first in order. See PrefillSplit."""
    batching: Batching = Batching.INFLIGHT
    batch_scheduler_policy: BatchSchedulerPolicy = BatchSchedulerPolicy.MAX_UTILIZATION
    """The default packs: few answers are as long as max_tokens allows, and what is preempted finds
    its KV on the host or in the prefix cache, or is computed again, with the same tokens."""
    fair_share: FairShare = FairShare.ADAPTER
    """The default keeps a flood on one adapter from the others; requests of one adapter, or of the
    base model alone, are first come, first served."""
    fair_input_weight: float = 1.0
    """What a prompt token counts that was computed, in the counters of fair shares."""
    fair_output_weight: float = 2.0
    fair_resident_lead: float = 2048.0
    """By so many weighted tokens the counter of a share whose adapters are on the device may be
    ahead: else adapters would come and go more often in a small pool."""
    max_seqs_per_adapter: int = 0
    """Sequences with one adapter that run at once; more of them wait and are passed. 0: any."""
    max_queue_size: int = 0
    """Requests that wait for a slot; 0 is no limit. Those that free slots will take are not
    counted."""
    max_queue_delay_ns: int = 0
    """While nothing runs, how long a request is held back so that others can join its first
    step."""
    enable_prefix_cache: bool = True
    num_draft_tokens: int = 0
    """Guessed ahead of every sequence at most, where its text repeats; 0: none."""
    max_draft_ngram: int = 3
    """A guess follows from so many last tokens at most."""
    adapter_aging_ns: int = DEFAULT_ADAPTER_AGING_NS
    """How long a request may be passed over because its adapters lack room. See CacheFiller."""
    adapter_ttl_ns: int | None = None
    """An adapter that was idle for so long leaves both tiers; None: it stays."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        self._check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_prefill_chunk is not None:
            self._check_at_least("max_prefill_chunk", self.max_prefill_chunk, 1)
        if not 0 <= self.shortest_prefill_share < 1:
            raise ConfigError(
                "shortest_prefill_share must be at least 0 and less than 1, got "
                f"{self.shortest_prefill_share}",
                param="shortest_prefill_share",
            )
        self._check_at_least("fair_input_weight", self.fair_input_weight, 0)
        self._check_at_least("fair_output_weight", self.fair_output_weight, 0)
        self._check_at_least("fair_resident_lead", self.fair_resident_lead, 0)
        self._check_at_least("max_seqs_per_adapter", self.max_seqs_per_adapter, 0)
        self._check_at_least("max_queue_size", self.max_queue_size, 0)
        self._check_at_least("max_queue_delay_ns", self.max_queue_delay_ns, 0)
        self._check_at_least("num_draft_tokens", self.num_draft_tokens, 0)
        self._check_at_least("max_draft_ngram", self.max_draft_ngram, 1)
        self._check_at_least("adapter_aging_ns", self.adapter_aging_ns, 0)
        if self.adapter_ttl_ns is not None:
            self._check_at_least("adapter_ttl_ns", self.adapter_ttl_ns, 1)

    @property
    def max_step_tokens(self) -> int:
        """Tokens that one row computes at most in one step."""
        if self.max_prefill_chunk is None:
            return self.max_num_batched_tokens
        return min(self.max_prefill_chunk, self.max_num_batched_tokens)

    @staticmethod
    def _check_at_least(name: str, value: float, low: float) -> None:
        if not value >= low:  # true for NaN, too
            raise ConfigError(f"{name} must be at least {low}, got {value}", param=name)
