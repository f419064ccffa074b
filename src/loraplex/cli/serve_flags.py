"""The flags of `loraplex serve` that are settings: one for each field of core.config."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

import typer

from loraplex.core.config import ALIASES, ModelConfig
from loraplex.core.server_config import ServerConfig

_HELP: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "Adapters": {
            "lora_root": "Every adapter below it is called by its path in it.",
            "multi_lora": "A JSON file: {NAME: PATH} of adapters.",
            "adapter_watch_seconds": "How often adapter folders are looked at; 0: once [5].",
            "allowed_adapter_roots": "Folders that clients may load adapters from; repeatable.",
            "allowed_adapter_hosts": "Hosts that clients may load adapters from: huggingface.co, "
            "s3://bucket; repeatable.",
            "allow_private_addresses": "Adapters may come from private addresses [off].",
            "max_adapter_bytes": "Largest adapter [4GiB].",
            "fetched_adapters_bytes": "Kept of fetched adapters [16GiB].",
            "enable_lora": "Whether adapters are served [on].",
            "lora_target_modules": "What adapters may change: attn_q or q_proj; repeatable [any].",
            "max_lora_rank": "Largest rank served [64].",
            "optimal_lora_rank": "The usual rank, by which memory is cut into pages [8].",
            "lora_device_bytes": "Device adapter pool, such as 256MiB.",
            "lora_device_fraction": "Device adapter pool, of what weights and KV leave; on a CPU "
            "of --memory [0.05].",
            "lora_host_bytes": "Host adapter cache [1GiB].",
            "lora_eviction_policy": "Who leaves first: lru, lfu or cost [lru].",
            "lora_ttl_seconds": "Idle adapters leave memory after so long.",
            "adapter_base_check": "An adapter of another base's name: warn or error [warn].",
            "persist_adapters": "Adapters loaded over the API are there after a restart [on].",
        },
        "Chat": {
            "tool_call_parser": "How the model writes tool calls; auto: as its chat template "
            "says [auto].",
            "reasoning_parser": "How it marks reasoning: auto, none, think or mistral [auto].",
        },
        "Server": {
            "host": "Address to bind [127.0.0.1].",
            "http_port": "OpenAI and KServe [8000].",
            "grpc_port": "KServe gRPC [8001].",
            "metrics_port": "Prometheus [8002].",
            "http": "Whether the HTTP port is opened [on].",
            "grpc": "Whether the gRPC port is opened [on].",
            "metrics": "Whether the Prometheus port is opened [on].",
            "request_socket": "A unix socket for Triton requests of this user's processes.",
            "stop_with_stdin": "Stop when standard input ends [off].",
            "dialect": "openai, or as llgtrt does: llgtrt, llgtrt_compat [openai].",
            "max_body_bytes": "Largest request body [64MiB].",
            "max_header_bytes": "Request line and headers, or gRPC metadata [64KiB].",
            "max_headers": "Headers of a request [100].",
            "max_stored_responses": "Kept of /v1/responses for each tenant; 0: none [1000].",
            "stored_responses_bytes": "Of each tenant [64MiB].",
            "stored_responses_seconds": "How long at most [86400].",
            "max_request_line_bytes": "Longest HTTP request line [8KiB].",
            "max_connections": "Open connections, of HTTP and of gRPC each [4096].",
            "header_timeout_seconds": "How long a request's headers may take [20].",
            "body_timeout_seconds": "How long a request's body may take [120].",
            "keep_alive_seconds": "How long an HTTP connection may be idle [75].",
            "trusted_proxies": "Whose X-Forwarded-For is believed: addresses, networks; "
            "repeatable.",
            "max_grpc_message_bytes": "Largest gRPC request [256MiB].",
            "max_grpc_streams": "Calls at once of one gRPC connection [1024].",
            "grpc_keepalive_seconds": "How often quiet gRPC connections are pinged [60].",
            "access_log": "A file for a JSON line per request; - is standard output [none].",
            "access_log_prompts": "With the prompts [off].",
            "otlp_endpoint": "OpenTelemetry collector for traces: http://host:4318 [none].",
            "state_dir": "Where staged adapters are kept.",
            "metrics_config": "Triton's, NAME=VALUE: summary_latencies=true; repeatable.",
            "cpu_metrics": "Metrics of the machine's CPUs [on].",
            "gpu_metrics": "Metrics of the machine's GPUs [on].",
            "log_level": "debug, info, warning or error [info].",
            "shutdown_seconds": "Requests in work may end after a stop [30].",
        },
        "Access": {
            "api_keys_file": "Tenants and hashes of their API keys: see loraplex keys [none].",
            "allow_no_keys": "Without keys, serve other machines all the same [off].",
            "health_needs_key": "Health routes ask for a key, too [off].",
            "tls_cert": "The server's certificate (PEM), for all ports [no TLS].",
            "tls_key": "The certificate's key (PEM).",
            "cors_origins": "Web pages from there may ask: https://app.example.org; repeatable.",
        },
        "Engine": {
            "dtype": "auto, float32, float16, bfloat16 [auto].",
            "quantization": "Weights in none, int8, int4 or, on a GPU, fp8 [none].",
            "weights_cache_dir": "Packed weights, for a fast next start; none: no cache.",
            "weights_cache_bytes": "Largest weights cache [64GiB].",
            "kv_dtype": "Of the KV cache: auto, float32, float16, bfloat16, int8 [auto].",
            "device": "cpu, cuda or cuda:N [cpu].",
            "cuda_graphs": "Record decode steps at the start, and replay them; GPU only [on].",
            "cuda_graph_batch_sizes": "For so many sequences: 1,8,32 [1 to 256 in steps].",
            "batch_invariant": "The same bits alone and in company; slower; GPU only [off].",
            "attention_backend": "Of a GPU: auto, triton or flashinfer [auto].",
            "max_model_len": "Longest prompt and output together.",
            "max_input_len": "Longest prompt.",
            "kv_cache_bytes": "KV cache, such as 4GiB.",
            "memory_bytes": "What the device may hold: weights, KV cache and adapters.",
            "kv_cache_fraction": "KV cache, of the device memory that weights leave [0.9].",
            "enable_prefix_cache": "Reuse the KV of equal prompt beginnings [on].",
            "num_threads": "Threads of the arithmetic.",
            "block_size": "Tokens in one KV block [16].",
            "tokenizer": "A folder or hub id of the tokenizer, if not the model's.",
            "chat_template": "A jinja file for chat.",
            "json_start_token": "With dialect llgtrt_compat, the token before a tool call.",
            "revision": "Branch, tag or commit of a hub id.",
            "engine_restart_seconds": "How long requests outlive an engine that died [300].",
            "engine_wait_seconds": "How long new requests wait for an engine that restarts [30].",
            "overlap": "Plan the next step while one runs [on a GPU on, else off].",
            "max_tokens_in_paged_kv_cache": "KV cache, in tokens at most.",
            "kv_cache_host_memory_bytes": "Host memory for the KV of preempted sequences [0].",
            "max_attention_window_size": "So many newest positions are seen; by layer: 4096,512.",
            "sink_token_length": "With a window, so many first positions are seen, too [0].",
            "iter_stats_max_iterations": "Steps that /v1/iterations remembers [1000].",
            "iteration_log": "A file of every input and plan, for loraplex replay.",
            "iteration_log_bytes": "Largest iteration log [1GiB].",
        },
        "Scheduling": {
            "max_num_seqs": "Sequences in one step [64].",
            "max_num_batched_tokens": "Tokens in one step [512].",
            "max_queue_size": "Waiting requests; 0: any [0].",
            "max_queue_delay_microseconds": "An idle engine waits so long for company [0].",
            "batching": "When sequences join: inflight or static (V1) [inflight].",
            "batch_scheduler_policy": "Who is let in: max_utilization or guaranteed_no_evict "
            "[max_utilization].",
            "fair_share": "Served alike: none, adapter, tenant or tenant_adapter [adapter].",
            "fair_input_weight": "What a prompt token counts in a fair share [1].",
            "fair_output_weight": "What a new token counts in a fair share [2].",
            "fair_resident_lead": "Counted tokens that resident adapters may be ahead [2048].",
            "max_seqs_per_adapter": "Running sequences with one adapter; 0: any [0].",
            "max_prefill_chunk": "Tokens of one prompt in one step.",
            "shortest_prefill_share": "Of a step's prompt tokens, for the shortest prompts first "
            "[0.5].",
            "enable_chunked_context": "It always is: taken for TensorRT-LLM's sake.",
            "adapter_aging_seconds": "A request may be passed so long for its adapter's room [2].",
            "num_draft_tokens": "Guessed ahead where a text repeats; 0: none [0].",
            "max_draft_ngram": "A guess follows from so many last tokens at most [3].",
        },
    }
)
"""By panel and setting, for --help; in brackets stands the default."""

_SHORT: Final[Mapping[str, str]] = MappingProxyType({"enable_prefix_cache": "prefix-cache"})
"""Flags that are not called as their settings."""

Command = TypeVar("Command", bound=Callable[..., None])


def with_settings(command: Command) -> Command:
    """Give a command that takes **settings one flag for each that it has not itself.

    None is a flag that is not given.
    """
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kinds = {**typing.get_type_hints(ServerConfig), **typing.get_type_hints(ModelConfig)}
    flags = [
        _flag(setting, kinds[setting], panel, text)
        for panel, settings in _HELP.items()
        for setting, text in settings.items()
        if setting not in signature.parameters
    ]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *flags]
    )
    return command


def _flag(setting: str, kind: Any, panel: str, text: str) -> inspect.Parameter:
    names = [_SHORT.get(setting, setting.replace("_", "-"))]
    names += [alias.replace("_", "-") for alias, meant in ALIASES.items() if meant == setting]
    of_flag = _kind(setting, kind)
    if of_flag is bool:
        declared = [f"--{name}/--no-{name}" for name in names]
    else:
        declared = [f"--{name}" for name in names]
    option = typer.Option(*declared, help=text, rich_help_panel=panel)
    return inspect.Parameter(
        setting,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[typing.Optional[of_flag], option],  # noqa: UP045
    )


def _kind(setting: str, kind: Any) -> Any:
    """The type of a flag: bytes and lists of numbers are parsed later, as in the environment."""
    if setting.endswith("_bytes"):
        return str
    options = [part for part in typing.get_args(kind) if part is not types.NoneType]
    if typing.get_origin(kind) is tuple:
        return list[str] if options[0] is str else str
    return options[0] if options else kind
