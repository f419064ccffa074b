"""Settings: what they are, and which values they take. `config_layers` joins the places that set
them.
"""

import math
import re
from typing import Any

import msgspec

from loraplex.core.errors import ConfigError
from loraplex.core.grammar import GrammarLimits
from loraplex.core.metrics_config import read_metrics_config
from loraplex.core.sampling_params import MAX_DRAFT_TOKENS
from loraplex.core.server_config import ServerConfig
from loraplex.core.tools import REASONING_PARSERS, TOOL_CALL_PARSERS
from loraplex.core.weight_precision import WeightPrecision

NO_CACHE = "none"
"""As weights_cache_dir; a folder of that name is ./none."""
MAX_GRAPH_BATCH_SIZE = 256
"""Beyond that, what it costs to launch a step's kernels is little beside what they compute."""
_INT64_MAX = 2**63 - 1

_CHOICES = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "kv_dtype": ("auto", "float32", "float16", "bfloat16", "int8"),
    "quantization": tuple(WeightPrecision),
    "adapter_base_check": ("warn", "error"),
    "attention_backend": ("auto", "triton", "flashinfer"),
    "lora_eviction_policy": ("lru", "lfu", "cost"),
    "batching": ("inflight", "static"),
    "batch_scheduler_policy": ("max_utilization", "guaranteed_no_evict"),
    "fair_share": ("none", "adapter", "tenant", "tenant_adapter"),
    "log_level": ("debug", "info", "warning", "error"),
    "tool_call_parser": ("auto", *TOOL_CALL_PARSERS),
    "reasoning_parser": ("auto", "none", *REASONING_PARSERS),
    "dialect": ("openai", "llgtrt", "llgtrt_compat"),
}
_HTTP_URL = re.compile(r"https?://[^\s/?#]+[^\s]*")
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.-]+(:[0-9]+)?|https?://\[[0-9a-fA-F:]+\](:[0-9]+)?")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
_MINIMUM = {
    "max_model_len": 1,
    "max_input_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_bytes": 1,
    "memory_bytes": 1,
    "max_tokens_in_paged_kv_cache": 1,
    "kv_cache_host_memory_bytes": 0,
    "sink_token_length": 0,
    "max_prefill_chunk": 1,
    "max_seqs_per_adapter": 0,
    "fair_input_weight": 0,
    "fair_output_weight": 0,
    "fair_resident_lead": 0,
    "num_draft_tokens": 0,
    "max_draft_ngram": 1,
    "adapter_aging_seconds": 0,
    "max_queue_size": 0,
    "max_queue_delay_microseconds": 0,
    "engine_restart_seconds": 0,
    "engine_wait_seconds": 0,
    "iter_stats_max_iterations": 1,
    "iteration_log_bytes": 1 << 20,
    "max_lora_rank": 1,
    "optimal_lora_rank": 1,
    "lora_device_bytes": 1,
    "lora_host_bytes": 1,
    "lora_ttl_seconds": 1,
    "weights_cache_bytes": 1,
    "num_threads": 1,
    "max_body_bytes": 1,
    "max_adapter_bytes": 1,
    "fetched_adapters_bytes": 0,
    "adapter_watch_seconds": 0,
    "shutdown_seconds": 0,
    "max_header_bytes": 1 << 10,
    "max_headers": 10,
    "max_stored_responses": 0,
    "stored_responses_bytes": 0,
    "stored_responses_seconds": 1,
    "max_request_line_bytes": 256,
    "max_connections": 1,
    "header_timeout_seconds": 0.001,
    "body_timeout_seconds": 0.001,
    "keep_alive_seconds": 0,
    "max_grpc_message_bytes": 1 << 10,
    "max_grpc_streams": 1,
    "grpc_keepalive_seconds": 1,
}

ALIASES = {
    "memory": "memory_bytes",
    "enable_trt_overlap": "overlap",
    "cuda_graph_mode": "cuda_graphs",
    "use_cuda_graph": "cuda_graphs",
    "cudagraph_capture_sizes": "cuda_graph_batch_sizes",
    "enable_kv_cache_reuse": "enable_prefix_cache",
    "gpt_model_type": "batching",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_fraction",
    "lora_cache_max_adapter_size": "max_lora_rank",
    "lora_cache_optimal_adapter_size": "optimal_lora_rank",
    "lora_cache_gpu_memory_fraction": "lora_device_fraction",
    "lora_cache_host_memory_bytes": "lora_host_bytes",
}
"""Other names of a model's settings: TensorRT-LLM's, one of vLLM's, and a short one."""

VALUE_ALIASES = {
    "tool_call_parser": {
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "granite-20b-fc": "granite",
        "qwen3_xml": "qwen3_coder",
        "qwen25": "hermes",
        "deepseekv3": "deepseek_v3",
    },
    "reasoning_parser": {
        "deepseek_r1": "think",
        "deepseek-r1": "think",
        "qwen3": "think",
        "glm45": "think",
    },
    "batching": {
        "inflight_fused_batching": "inflight",
        "inflight_batching": "inflight",
        "V1": "static",
        "v1": "static",
    },
}
"""TensorRT-LLM's words for values, and vLLM's and SGLang's for parsers."""


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapter to load at the start."""

    path: str
    task_id: int | None = None
    optional: bool = False
    """The server starts without it if it does not load, tells requests why, and takes it once its
    files are right."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One served base model and its engine."""

    path: str
    """A Hugging Face folder or hub id."""
    revision: str | None = None
    dtype: str = "auto"
    """auto (the checkpoint's), float32, float16 or bfloat16."""
    kv_dtype: str = "auto"
    """Of stored keys and values: auto (the model's), float32, float16, bfloat16 or int8."""
    quantization: str = "none"
    """Of the linear layers' weights, when they are loaded: none, int8, int4 or, on a GPU, fp8."""
    weights_cache_dir: str = ""
    """Packed weights, for a fast next start; none: no cache; empty: beside the staged adapters if
    state_dir is set, else the user's cache directory."""
    weights_cache_bytes: int = 64 << 30
    """All models together; those used longest ago go first."""
    device: str = "cpu"
    cuda_graphs: bool = True
    """On a GPU, steps that only decode are recorded at the start, and replayed."""
    cuda_graph_batch_sizes: tuple[int, ...] = ()
    """For these numbers of sequences, as far as max_num_seqs goes; a step takes the next larger
    one. Empty: 1, 2, 4, every 8 to 64, every 16 to 256, and max_num_seqs."""
    batch_invariant: bool = False
    """On a GPU: an answer has the same bits alone and in company; slower. On a CPU it has them."""
    attention_backend: str = "auto"
    """On a GPU: triton, flashinfer, or auto: flashinfer if it is installed and can do what the
    model needs, else triton."""
    max_model_len: int | None = None
    """Prompt and output together; None: what the model was made for."""
    max_input_len: int | None = None
    """Longest prompt; None: as max_model_len leaves room."""
    max_num_seqs: int = 64
    """Sequences in one step."""
    max_num_batched_tokens: int = 512
    """Tokens in one step, prompts and outputs together."""
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """None: kv_cache_fraction, if the device's memory is known; else room for max_num_seqs
    sequences of max_model_len, at most 2 GiB."""
    memory_bytes: int | None = None
    """What the device may hold: weights, KV cache, adapters, and what a GPU's steps and graphs
    take; None: on a CPU unknown, else all."""
    kv_cache_fraction: float = 0.9
    """Of the device's memory that weights, steps and graphs leave."""
    max_tokens_in_paged_kv_cache: int | None = None
    """Of the KV cache: it is no larger, and so large where nothing else says its size."""
    kv_cache_host_memory_bytes: int = 0
    """Host memory for the KV of preempted sequences; 0: it is computed again."""
    max_attention_window_size: tuple[int, ...] = ()
    """A position sees at most so many newest ones; a list is by layer, and repeats."""
    sink_token_length: int = 0
    """With a window, so many first positions are seen, too."""
    enable_prefix_cache: bool = True
    batching: str = "inflight"
    """When sequences join: inflight (at any step) or static (V1: a batch runs to its end)."""
    batch_scheduler_policy: str = "max_utilization"
    """max_utilization lets in what has room now, and may preempt the youngest; guaranteed_no_evict
    lets in what has room for its longest possible answer."""
    fair_share: str = "adapter"
    """Between whom waiting requests are served alike: none, adapter, tenant, tenant_adapter."""
    fair_weights: dict[str, float] = {}
    """How large the shares of adapters and tenants are, by name; a name that is not here has 1."""
    fair_input_weight: float = 1.0
    """What a computed prompt token counts in a fair share."""
    fair_output_weight: float = 2.0
    """What a new token counts in a fair share."""
    fair_resident_lead: float = 2048.0
    """A share whose adapters are on the device may be so many counted tokens ahead."""
    max_seqs_per_adapter: int = 0
    """Sequences with one adapter that run at once; others wait, and are passed. 0: any."""
    max_prefill_chunk: int | None = None
    """Tokens of one prompt that one step computes; None: as many as the step has room for."""
    shortest_prefill_share: float = 0.5
    """Of a step's tokens for prompts, the part that goes to the shortest ones first; below 1."""
    enable_chunked_context: bool = True
    """A prompt longer than a step is always computed in chunks: TensorRT-LLM's name is taken, and
    false is refused."""
    adapter_aging_seconds: float = 2.0
    """How long a request may be passed because its adapters lack room."""
    num_draft_tokens: int = 0
    """Tokens guessed ahead of a sequence where its text repeats, if the request does not say."""
    max_draft_ngram: int = 3
    """A guess follows from so many last tokens at most."""
    max_queue_size: int = 0
    """Waiting requests; 0 is no limit."""
    max_queue_delay_microseconds: int = 0
    """How long an idle engine waits for more requests to join the first."""
    engine_restart_seconds: float = 300.0
    """How long requests of an engine that died wait for the next one, which goes on with them."""
    engine_wait_seconds: float = 30.0
    """The same for requests that come meanwhile."""
    overlap: bool | None = None
    """Plan the next step while one runs. A sequence that ends is computed once more in vain. None:
    on a GPU, but not on a CPU."""
    iter_stats_max_iterations: int = 1000
    """The newest steps that /v1/iterations remembers."""
    iteration_log: str = ""
    """A file that gets every input and plan of the scheduler, for `loraplex replay`. It holds the
    tokens of prompts and answers; empty: none."""
    iteration_log_bytes: int = 1 << 30
    """Older parts of the iteration log go when it is larger; what is left cannot be replayed."""
    enable_lora: bool = True
    """Off: requests for an adapter are refused."""
    lora_target_modules: tuple[str, ...] = ()
    """The linear layers that adapters may change, by Hugging Face's names (q_proj) or
    TensorRT-LLM's (attn_q); empty: any."""
    max_lora_rank: int = 64
    optimal_lora_rank: int = 8
    """An adapter of this rank on every module fills whole pages of the device pool."""
    lora_device_bytes: int | None = None
    """The device pool; None: lora_device_fraction, if the device's memory is known; else 256 MiB.
    Never less than one adapter of max_lora_rank."""
    lora_device_fraction: float = 0.05
    """Of the device's memory that weights and KV cache leave; on a CPU of memory_bytes."""
    lora_host_bytes: int = 1 << 30
    lora_eviction_policy: str = "lru"
    """Who leaves a full tier first: lru, lfu or cost (bytes times load time by use)."""
    lora_ttl_seconds: float | None = None
    """An adapter that was idle for so long leaves both tiers; None: only for others."""
    adapter_base_check: str = "warn"
    """What an adapter that says that it was trained on another base leads to: warn or error."""
    num_threads: int | None = None
    """Of the engine's arithmetic; None: torch's choice."""
    tokenizer: str = ""
    """A folder or hub id with the tokenizer's files; empty: the model's folder has them."""
    tokenizer_config: dict[str, Any] = {}
    """What replaces entries of the folder's tokenizer_config.json; null takes one away."""
    chat_template: str | None = None
    """A jinja file that replaces the folder's own."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls; auto: as its chat template says."""
    reasoning_parser: str = "auto"
    """How it marks reasoning, which answers then have apart from their content; auto: as its chat
    template says; none: it is a part of the content."""
    json_start_token: str = ""
    """The special token before a tool call, where calls are written as llgtrt has them."""
    grammar_limits: GrammarLimits = GrammarLimits()
    """What one grammar of a request may cost."""
    adapters: dict[str, AdapterConfig] = {}
    adapter_dirs: tuple[str, ...] = ()
    """Every sub-folder that holds an adapter is one of that name."""
    lora_root: str = ""
    """A folder whose adapters, at any depth, are called by their path in it, as llgtrt has it."""
    multi_lora: str = ""
    """A JSON file of names and paths, as Triton's vLLM backend has it (multi_lora.json)."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    server: ServerConfig = ServerConfig()
    models: dict[str, ModelConfig] = {}


def problem(field: str, value: Any) -> str | None:
    """What is wrong with the value of a setting, as the end of a sentence."""
    if value is None:
        return None
    if field in _CHOICES and value not in _CHOICES[field]:
        known = (*_CHOICES[field], *VALUE_ALIASES.get(field, ()))
        return f"must be one of {', '.join(known)}"
    if field == "device" and not _DEVICE.fullmatch(value):
        return "must be cpu, cuda or cuda:N"
    if field == "cuda_graph_batch_sizes" and not all(
        1 <= size <= MAX_GRAPH_BATCH_SIZE for size in value
    ):
        return f"must be numbers from 1 to {MAX_GRAPH_BATCH_SIZE}"
    if field == "cors_origins" and not all(_ORIGIN.fullmatch(origin) for origin in value):
        return "must be origins such as https://app.example.org, or *"
    if field.endswith("_fraction") and not 0 < value <= 1:
        return "must be more than 0 and at most 1"
    if field == "metrics_config":
        return _metrics_problem(value)
    if field == "otlp_endpoint" and value and not _HTTP_URL.fullmatch(value):
        return "must be an address as http://host:4318"
    if field.endswith("_port") and not 0 <= value <= 65535:
        return "must be a port from 0 (any free one) to 65535"
    return _scheduling_problem(field, value) or _minimum_problem(field, value)


def _metrics_problem(words: tuple[str, ...]) -> str | None:
    try:
        read_metrics_config(words)
    except ConfigError as error:
        return str(error)
    return None


def _scheduling_problem(field: str, value: Any) -> str | None:
    if field == "enable_chunked_context" and not value:
        return "cannot be false: a prompt longer than a step is always computed in chunks"
    if field == "shortest_prefill_share" and not 0 <= value < 1:
        return "must be at least 0 and less than 1"
    if field == "fair_weights" and not all(0 < weight < math.inf for weight in value.values()):
        return "must have weights that are more than 0, and finite"
    if field == "num_draft_tokens" and value > MAX_DRAFT_TOKENS:
        return f"must be at most {MAX_DRAFT_TOKENS}"
    return None


def _minimum_problem(field: str, value: Any) -> str | None:
    if field in _MINIMUM and not value >= _MINIMUM[field]:  # true for NaN, too
        return f"must be at least {_MINIMUM[field]}"
    if field in _MINIMUM and value > _INT64_MAX:
        return f"must be at most {_INT64_MAX}"
    return None
