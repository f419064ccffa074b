"""Settings of the scheduler: how it trades latency, throughput and fairness."""

import enum
import functools
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from loraplex.core.sampling_params import MAX_DRAFT_TOKENS
from loraplex.core.setting import Setting, Settings

_scheduling = functools.partial(Setting, "Scheduling")


class Batching(enum.StrEnum):
    """When sequences join the running ones (TensorRT-LLM's gpt_model_type)."""

    INFLIGHT = "inflight"
    """Sequences join at any step; each leaves when it ends."""
    STATIC = "static"
    """V1: a batch is formed and runs until all its requests have ended; then the next is formed."""


class BatchSchedulerPolicy(enum.StrEnum):
    """Which sequences are admitted while KV blocks are left."""

    MAX_UTILIZATION = "max_utilization"
    """All that fit now. If blocks run out later, the youngest is preempted."""
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    """All whose longest possible output fits: nothing is ever preempted."""


class FairShare(enum.StrEnum):
    """What shares the server's capacity equally."""

    NONE = "none"
    """Nothing: first come, first served."""
    ADAPTER = "adapter"
    """Sets of adapters; the base model is one."""
    TENANT = "tenant"
    TENANT_ADAPTER = "tenant_adapter"


BATCHING_ALIASES: Final = {
    "inflight_fused_batching": "inflight",
    "inflight_batching": "inflight",
    "V1": "static",
    "v1": "static",
}


def _share(value: float) -> str | None:
    return None if 0 <= value < 1 else "must be at least 0 and less than 1"


MIN_SHARE_WEIGHT: Final = 1e-3
MAX_SHARE_WEIGHT: Final = 1e3
"""Weights that an operator may choose. A share by tenant and adapter has the product of two: its
float64 counter still resolves a token after years."""


def weight_problem(weight: float) -> str | None:
    """Return what is wrong with the weight of a share, as the end of a sentence."""
    if MIN_SHARE_WEIGHT <= weight <= MAX_SHARE_WEIGHT:
        return None
    return f"must be from {MIN_SHARE_WEIGHT:g} to {MAX_SHARE_WEIGHT:g}, got {weight}"


def _weights(value: Mapping[str, float]) -> str | None:
    for name, weight in value.items():
        if wrong := weight_problem(weight):
            return f"has a weight for {name!r} that {wrong}"
    return None


def _always_on(value: bool) -> str | None:
    if value:
        return None
    return "cannot be false: a prompt longer than a step is always computed in chunks"


_MAX_NUM_SEQS: Final = _scheduling(
    "Maximum number of sequences in one step",
    "On a CPU 64, or 4 for each core if that is more, up to 256. On a GPU 256, or fewer if steps "
    "would take more than a quarter of the memory that the weights leave. The log reports the "
    "choice; see [Operations](operations.md#sizes-by-device).",
    default="by device",
    minimum=1,
)
_MAX_NUM_BATCHED_TOKENS: Final = _scheduling(
    "Maximum number of tokens in one step, of prompts and outputs together",
    "Longer prompts are computed in chunks. On a CPU 512, or 16 for each core if that is more, up "
    "to 2048. On a GPU 8192, or fewer, like `max_num_seqs`. Never less than `max_num_seqs`.",
    default="by device",
    minimum=1,
)


class SchedulingSettings(Settings, frozen=True, kw_only=True):
    """Limits of one step and of the queue, and the policies that fill them, as they are set."""

    max_num_seqs: Annotated[int | None, _MAX_NUM_SEQS] = None
    max_num_batched_tokens: Annotated[int | None, _MAX_NUM_BATCHED_TOKENS] = None
    max_queue_size: Annotated[
        int,
        _scheduling(
            "Maximum number of waiting requests; 0: no limit",
            "Further requests are refused with status 429 (KServe: 503). Requests that free slots "
            "will take are not counted.",
            minimum=0,
        ),
    ] = 0
    max_queue_delay_microseconds: Annotated[
        int,
        _scheduling(
            "Time in microseconds that an idle engine waits for more requests to join the first",
            minimum=0,
        ),
    ] = 0
    batching: Annotated[
        Batching,
        _scheduling(
            "When sequences join: inflight (at any step) or static (V1)",
            "With `static` a batch is formed and runs until all its requests have ended. "
            "TensorRT-LLM's values `inflight_fused_batching` and `V1` are accepted.",
            aliases=("gpt_model_type",),
            value_aliases=BATCHING_ALIASES,
        ),
    ] = Batching.INFLIGHT
    batch_scheduler_policy: Annotated[
        BatchSchedulerPolicy,
        _scheduling(
            "Admission policy: max_utilization or guaranteed_no_evict",
            "`max_utilization` admits what fits now, and preempts the youngest sequence if KV "
            "blocks run out; `guaranteed_no_evict` admits a sequence only if its longest possible "
            "output fits.",
        ),
    ] = BatchSchedulerPolicy.MAX_UTILIZATION
    # The default packs: few outputs are as long as max_tokens allows. A preempted sequence finds
    # its KV on the host or in the prefix cache, or computes it again, with the same tokens.
    fair_share: Annotated[
        FairShare | None,
        _scheduling(
            "What shares capacity equally: none, adapter, tenant or tenant_adapter",
            "Tokens and slots are shared. `none` is first come, first served. Requests of one "
            "adapter are always first come, first served among themselves.",
            default="tenant with API keys, else adapter",
        ),
    ] = None
    # The default protects the others from a flood of requests of one tenant, or for one adapter.
    fair_weights: Annotated[
        dict[str, float],
        _scheduling(
            "Sizes of the shares, by the name of an adapter or tenant",
            "Weights from 0.001 to 1000; a name that is not listed has 1. A request with several "
            "adapters has the smallest of their weights. In a file: the table "
            "`[models.NAME.fair_weights]`.",
            default="none",
            check=_weights,
            is_file_only=True,
        ),
    ] = msgspec.field(default_factory=dict)
    fair_input_weight: Annotated[
        float, _scheduling("Weight of a computed prompt token in a fair share", minimum=0)
    ] = 1.0
    fair_output_weight: Annotated[
        float, _scheduling("Weight of an output token in a fair share", minimum=0)
    ] = 2.0
    fair_resident_lead: Annotated[
        float,
        _scheduling(
            "Lead, in weighted tokens, of a share whose adapters are on the device",
            "Without it, adapters would be loaded and evicted more often in a small pool.",
            minimum=0,
        ),
    ] = 2048.0
    max_seqs_per_adapter: Annotated[
        int,
        _scheduling(
            "Maximum number of running sequences with one adapter; 0: no limit",
            "Others wait, and requests for other adapters pass them. A wider beam search is "
            "refused.",
            minimum=0,
        ),
    ] = 0
    max_prefill_chunk: Annotated[
        int | None,
        _scheduling(
            "Maximum number of tokens of one prompt in one step", default="no limit", minimum=1
        ),
    ] = None
    shortest_prefill_share: Annotated[
        float,
        _scheduling(
            "Share of a step's prompt tokens that goes to the shortest prompts first; below 1",
            "The rest goes to the prompts in their order.",
            check=_share,
        ),
    ] = 0.5
    shared_step_seconds: Annotated[
        float,
        _scheduling(
            "Target time in seconds of a step while several tenants have requests; 0: none",
            "Prompts are then computed in shorter chunks, an eighth of a step or more, and wide "
            "beam searches take turns, so that a small request waits less for another tenant's "
            "long ones. A tenant alone has full steps. Texts whose vectors, labels or scores are "
            "computed have such chunks whenever others are being written.",
            minimum=0,
        ),
    ] = 0.01
    enable_chunked_context: Annotated[
        bool,
        _scheduling(
            "Accepted for TensorRT-LLM's sake; must be on",
            "A prompt longer than a step is always computed in chunks.",
            check=_always_on,
        ),
    ] = True
    adapter_aging_seconds: Annotated[
        float,
        _scheduling(
            "Time in seconds that a request may be passed over because its adapters do not fit",
            minimum=0,
        ),
    ] = 2.0
    num_draft_tokens: Annotated[
        int,
        _scheduling(
            "Maximum number of draft tokens per sequence and step (prompt lookup); 0: none",
            "Speculative decoding proposes tokens where a text repeats itself; it changes no "
            f"output. At most {MAX_DRAFT_TOKENS}. A request's own `num_draft_tokens` wins.",
            minimum=0,
            maximum=MAX_DRAFT_TOKENS,
        ),
    ] = 0
    max_draft_ngram: Annotated[
        int,
        _scheduling("Maximum number of last tokens that draft tokens are looked up by", minimum=1),
    ] = 3
    max_draft_window: Annotated[
        int,
        _scheduling(
            "Maximum number of last prompt tokens in which draft tokens are looked up",
            "Their index takes about 0.4 KB a token for each request with draft tokens.",
            minimum=1,
        ),
    ] = 8192
    enable_prefix_cache: Annotated[
        bool,
        Setting(
            "Memory",
            "Reuse of the KV cache for equal prompt prefixes",
            aliases=("enable_kv_cache_reuse",),
            flag="prefix-cache",
        ),
    ] = True
    state_checkpoint_tokens: Annotated[
        int,
        Setting(
            "Memory",
            "Number of prompt tokens between the recurrent states that the prefix cache keeps",
            "For models with recurrent layers; a multiple of the number of tokens between their "
            "states. The last state of each prompt is kept, too.",
            minimum=1,
        ),
    ] = 1024
    lora_ttl_seconds: Annotated[
        float | None,
        Setting(
            "Adapters",
            "Time in seconds after which an idle adapter leaves host and device memory",
            "It is loaded again when a request needs it.",
            default="never",
            minimum=1,
        ),
    ] = None

    @property
    def share_kind(self) -> FairShare:
        """Return what shares capacity; a server sets its default by its API keys."""
        return self.fair_share or FairShare.ADAPTER


class SchedulerSettings(SchedulingSettings, frozen=True, kw_only=True):
    """The settings as the scheduler needs them: with the limits that the device determined."""

    max_num_seqs: Annotated[int, _MAX_NUM_SEQS] = 64
    max_num_batched_tokens: Annotated[int, _MAX_NUM_BATCHED_TOKENS] = 512

    @property
    def max_step_tokens(self) -> int:
        """Maximum number of tokens that one row computes in one step."""
        if self.max_prefill_chunk is None:
            return self.max_num_batched_tokens
        return min(self.max_prefill_chunk, self.max_num_batched_tokens)
