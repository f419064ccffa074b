"""Rows of the tables of settings in the files of a repository.

They are parameters of a config.pbtxt and keys of a model.json.
"""

import dataclasses
import difflib
import enum
import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from loraplex.core.support import Feature, Support


class Kind(enum.Enum):
    """Type of a value; the enum value names the allowed ones in errors."""

    TEXT = "a text"
    BOOL = "True, true, TRUE, 1, False, false, FALSE or 0"
    WHOLE = "a whole number"
    NUMBER = "a number"
    WHOLES = "whole numbers with commas between them"
    ANY = "any value"


@dataclasses.dataclass(frozen=True, slots=True)
class SettingRow:
    """Effect of one key. A key that works and has no `setting` is read by name elsewhere."""

    key: str
    kind: Kind
    support: Support
    reason: str = ""
    """What the key does, why it does nothing, or what a refused one would need."""
    setting: str = ""
    """The setting that has its value."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused key that request nothing."""
    is_ours: bool = False
    """Whether no replaced system has the key."""

    @property
    def feature(self) -> Feature:
        note = self.reason or (f"the setting `{self.setting}`" if self.setting else "")
        if self.neutral:
            note += f"; {', '.join(f'`{value}`' for value in self.neutral)} may stay"
        form = "" if self.kind is Kind.ANY else self.kind.name.lower()
        return Feature(self.key, self.support, note, form, is_ours=self.is_ours)


def setting(key: str, kind: Kind, field: str = "", reason: str = "") -> SettingRow:
    """Return the row of a key that sets a setting; reason: what it does, instead of its name."""
    return SettingRow(key, kind, Support.WORKS, reason, field or key)


def here(key: str, kind: Kind, reason: str, *, is_ours: bool = False) -> SettingRow:
    """Return the row of a key that works in another way."""
    return SettingRow(key, kind, Support.WORKS, reason, is_ours=is_ours)


def no_effect(key: str, reason: str, kind: Kind = Kind.ANY) -> SettingRow:
    return SettingRow(key, kind, Support.NO_EFFECT, reason)


def refused(key: str, reason: str, *neutral: Any) -> SettingRow:
    """Return the row of a key that is an error, except for its neutral values."""
    return SettingRow(key, Kind.ANY, Support.REFUSED, reason, neutral=neutral)


def _settings(kind: Kind, **fields: str) -> Iterable[SettingRow]:
    return (setting(key, kind, field) for key, field in fields.items())


def _none(reason: str, keys: str) -> Iterable[SettingRow]:
    return (no_effect(key, reason) for key in keys.split())


RANK_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
PARALLEL = (*RANK_SIZES, "data_parallel_size")

ENGINE_ARGS = (
    here("model", Kind.TEXT, "the setting `path`"),
    here("tokenizer", Kind.TEXT, "the setting `tokenizer`"),
    *_settings(
        Kind.TEXT,
        revision="revision",
        dtype="dtype",
        kv_cache_dtype="kv_dtype",
        quantization="quantization",
    ),
    *_settings(
        Kind.WHOLE,
        max_model_len="max_model_len",
        max_num_seqs="max_num_seqs",
        max_num_batched_tokens="max_num_batched_tokens",
        block_size="block_size",
        max_lora_rank="max_lora_rank",
        kv_cache_memory_bytes="kv_cache_bytes",
        long_prefill_token_threshold="max_prefill_chunk",
    ),
    *_settings(Kind.NUMBER, gpu_memory_utilization="kv_cache_fraction"),
    *_settings(Kind.BOOL, enable_prefix_caching="enable_prefix_cache", async_scheduling="overlap"),
    *_settings(
        Kind.WHOLES,
        cudagraph_capture_sizes="cuda_graph_batch_sizes",
        cuda_graph_sizes="cuda_graph_batch_sizes",
    ),
    here("enforce_eager", Kind.BOOL, "no steps are recorded on a GPU: `cuda_graphs` false"),
    here("enable_lora", Kind.BOOL, "reads multi_lora.json; without it `lora_name` is refused"),
    here("disable_log_stats", Kind.BOOL, "no vllm:* families that count requests; the gauges stay"),
    here("swap_space", Kind.NUMBER, "GiB of `kv_cache_host_memory_bytes`"),
    here("tensor_parallel_size", Kind.WHOLE, "with fewer GPUs 1, with a warning"),
    here("pipeline_parallel_size", Kind.WHOLE, "more than 1 is served as 1, with a warning"),
    here("data_parallel_size", Kind.WHOLE, "more than 1 is served as 1, with a warning"),
    here("device", Kind.TEXT, "auto, cuda, cuda:N or cpu"),
    here("speculative_config", Kind.ANY, "the method ngram, which needs no second model"),
    *_none(
        "the setting `log_requests` decides, and prompts are not logged",
        "disable_log_requests enable_log_requests max_log_len",
    ),
    *_none("the model's name in the repository counts", "served_model_name"),
    *_none(
        "adapters are held as far as lora_device_bytes and lora_host_bytes go",
        "max_loras max_cpu_loras fully_sharded_loras lora_dtype lora_extra_vocab_size "
        "enable_lora_bias enable_tower_connector_lora specialize_active_lora",
    ),
    *_none(
        "the tensors of an adapter's experts determine their layout",
        "enable_mixed_moe_lora_format enable_moe_shared_loras",
    ),
    *_none(
        "no code of a model's folder is run, and the tokenizer's files determine its type",
        "trust_remote_code tokenizer_mode tokenizer_revision code_revision tokenizer_pool_size "
        "tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers",
    ),
    *_none(
        "weights are read as they lie in the folder or the hub's own cache",
        "download_dir safetensors_load_strategy config_format hf_token ignore_patterns "
        "model_loader_extra_config use_tqdm_on_load pt_load_map_location "
        "max_parallel_loading_workers model_impl hf_config_path",
    ),
    *_none(
        "one process serves a model",
        "worker_use_ray engine_use_ray distributed_executor_backend ray_workers_use_nsight "
        "placement_group master_addr master_port nnodes node_rank worker_cls "
        "worker_extension_cls disable_custom_all_reduce distributed_timeout_seconds "
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "dp_sync_interval enable_batch_sharded_sampling enable_nccl_comm_suspend "
        "dcp_q_replicate prefill_context_parallel_size "
        "decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "dcp_comm_backend disable_nccl_for_dp_synchronization api_process_count "
        "api_process_rank _api_process_count _api_process_rank cpu_distributed_timeout_seconds "
        "enable_multimodal_encoder_data_parallel numa_bind numa_bind_nodes numa_bind_cpus",
    ),
    *_none(
        "all experts are on one device, with the kernels for it",
        "enable_expert_parallel all2all_backend enable_dbo ubatch_size moe_backend "
        "dbo_decode_token_threshold dbo_prefill_token_threshold eplb_config enable_eplb "
        "expert_placement_strategy num_redundant_experts eplb_window_size eplb_step_interval "
        "eplb_log_balancedness enable_ep_weight_filter enable_elastic_ep",
    ),
    *_none("requests for routed experts are refused", "enable_return_routed_experts"),
    *_none(
        "of models that see or hear",
        "limit_mm_per_prompt interleave_mm_strings media_io_kwargs skip_mm_profiling "
        "video_pruning_rate mm_processor_kwargs disable_mm_preprocessor_cache language_model_only "
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
        "disable_chunked_mm_input "
        "mm_tensor_ipc allowed_local_media_path allowed_media_domains io_processor_plugin "
        "default_mm_loras enable_mm_embeds image_input_type image_token_id image_input_shape "
        "image_feature_size ec_manager_config video_pruning_method mm_processor_device "
        "mm_ipc_gpu_memory_gb mm_device_do_normalize mm_hasher_algorithm "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin",
    ),
    *_none(
        "of models with a state in addition to the KV cache",
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend "
        "gdn_prefill_backend kda_prefill_backend mamba_config prefix_match_unit "
        "replayssm_buffer_len use_replayssm mamba_ssu_algorithm mamba_cache_philox_rounds "
        "enable_mamba_cache_stochastic_rounding",
    ),
    *_none(
        "the engine plans this itself",
        "enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills max_paddings "
        "use_v2_block_manager num_lookahead_slots num_gpu_blocks_override scheduler_delay_factor "
        "scheduling_policy scheduler_cls preemption_mode num_scheduler_steps stream_interval "
        "multi_step_stream_outputs disable_async_output_proc prefix_caching_hash_algo "
        "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill max_context_len_to_capture "
        "max_seq_len_to_capture max_cudagraph_capture_size disable_cascade_attn "
        "scheduler_reserve_full_isl prefill_schedule_interval watermark "
        "calculate_kv_scales override_attention_dtype optimization_level compilation_config "
        "attention_config attention_backend kernel_config linear_backend ir_op_priority "
        "performance_mode additional_config "
        "override_neuron_config enable_flashinfer_autotune max_num_scheduled_tokens "
        "prefix_cache_retention_interval use_fp64_gumbel enable_bf16x3_router_gemm "
        "enable_cumem_allocator",
    ),
    *_none("all models of a server have one: see shutdown_seconds", "shutdown_timeout"),
    *_none(
        "an engine that dies is always started again",
        "enable_fault_tolerance fault_tolerance_config",
    ),
    *_none("see `enable_prompt_adapter`", "max_prompt_adapters max_prompt_adapter_token"),
    *_none(
        "draft tokens never change an output, and are few where they fail",
        "speculative_disable_mqa_scorer speculative_max_model_len "
        "speculative_disable_by_batch_size spec_decoding_acceptance_method "
        "typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha disable_logprobs_during_spec_decoding",
    ),
    *_none(
        "every request decides its own output length, logprobs and seed",
        "max_logprobs seed enable_sleep_mode generation_config override_generation_config",
    ),
    *_none(
        "grammars are always served",
        "guided_decoding_backend guided_decoding_disable_fallback structured_outputs_config "
        "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties "
        "enable_reasoning reasoning_parser reasoning_parser_plugin reasoning_config",
    ),
    *_none(
        "metrics and times are always there",
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "aggregate_engine_logging profiler_config observability_config kv_cache_metrics "
        "kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing "
        "enable_mfu_metrics enable_logging_iteration_details enable_mm_processor_stats "
        "fail_on_environ_validation per_request_spec_decode_metrics jit_monitor_mode "
        "jit_monitor_verbose",
    ),
    refused("load_format", "weights that are not in the folder", "auto", "safetensors", "pt"),
    # One server generates, embeds and classifies, whichever of these is requested.
    refused("task", "rewards", "auto", "generate", "embed", "embedding", "classify", "score"),
    refused("runner", "draft models", "auto", "generate", "pooling"),
    refused("convert", "rewards", "auto", "none", "embed", "classify"),
    *(refused(f"{name}pooler_config", "another pooling") for name in ("override_", "")),
    refused("skip_tokenizer_init", "a server without a tokenizer"),
    refused("tokens_only", "a server without a tokenizer"),
    refused("enable_prompt_embeds", "prompts that are embeddings"),
    refused("hf_overrides", "a change of the model's own config.json"),
    refused("rope_scaling", "a change of the model's own config.json"),
    refused("rope_theta", "a change of the model's own config.json"),
    refused("disable_sliding_window", "a change of the model's own config.json"),
    refused("long_lora_scaling_factors", "a change of the model's own config.json"),
    refused("logits_processors", "code of the operator's"),
    refused("logits_processor_pattern", "code of the operator's"),
    refused("logprobs_mode", "log probabilities of another kind", "raw_logprobs"),
    refused("lora_target_modules", "adapters without a part of their modules"),
    refused("device_ids", "devices by number: see device"),
    refused("max_num_queued_reqs", "a limit of running and waiting requests: see max_queue_size"),
    refused("max_num_queued_tokens", "a limit of waiting tokens: see max_queue_size"),
    refused("enable_trace_replay", "requests of a recorded trace"),
    refused("kv_transfer_config", "KV that other servers share"),
    refused("ec_transfer_config", "KV that other servers share"),
    refused("kv_events_config", "KV that other servers share"),
    refused("weight_transfer_config", "weights from elsewhere while it serves"),
    refused("cpu_offload_gb", "weights that are not on the device"),
    refused("cpu_offload_params", "weights that are not on the device"),
    refused("offload_backend", "weights that are not on the device", "auto"),
    refused("offload_group_size", "weights that are not on the device"),
    refused("offload_num_in_group", "weights that are not on the device", 1),
    refused("offload_prefetch_step", "weights that are not on the device", 1),
    refused("offload_params", "weights that are not on the device"),
    refused("kv_offloading_size", "KV on the host: see swap_space"),
    refused("kv_offloading_backend", "KV on the host: see swap_space", "native"),
    refused("speculative_model", "a draft model"),
    refused("num_speculative_tokens", "a draft model"),
    refused("speculative_draft_tensor_parallel_size", "a draft model"),
    refused("ngram_prompt_lookup_max", "a draft model"),
    refused("ngram_prompt_lookup_min", "a draft model"),
    refused("speculative_model_quantization", "a draft model"),
    refused("spec_method", "draft tokens: see speculative_config"),
    refused("spec_model", "a draft model"),
    refused("spec_tokens", "draft tokens: see speculative_config"),
    refused("diffusion_config", "a model that does not write from left to right"),
    refused("enable_prompt_adapter", "prompt tuning"),
    refused("model_weights", "weights that are not in the folder"),
    refused("quantization_param_path", "weights that are not in the folder"),
    refused("quantization_config", "a quantisation in detail: see quantization"),
    refused("allow_deprecated_quantization", "an old quantisation"),
    refused("model_class_overrides", "code of the operator's"),
    refused("kv_cache_dtype_skip_layers", "a KV cache of two types", "[]"),
    refused("qlora_adapter_name_or_path", "an adapter in the weights: see enable_lora"),
)
"""Rows by what they do, named as in EngineArgs and AsyncEngineArgs.

A refused key may stay if it is null, false, 0 or empty.
"""

_ROWS: Mapping[str, SettingRow] = MappingProxyType({row.key: row for row in ENGINE_ARGS})


def row_of(key: str) -> SettingRow:
    """Return the row of a key. Raises ValueError with the nearest key."""
    row = _ROWS.get(key)
    if row is None:
        close = difflib.get_close_matches(key, _ROWS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"{key} is not an engine argument of vLLM{hint}")
    return row


def read_value(row: SettingRow, value: Any) -> Any:
    """Read a value; None if it is not set. Raises ValueError that names the allowed values."""
    if value is None or (value == "None" and row.kind is not Kind.TEXT):
        return None
    try:
        return _READERS[row.kind](value)
    except (TypeError, ValueError):
        raise ValueError(f"{row.key}: {value!r} is not {_MEANINGS[row.kind]}") from None


def is_neutral(row: SettingRow, value: Any) -> bool:
    """Return whether this value of a REFUSED key may stay."""
    written = value.lower() if isinstance(value, str) else value
    return not value or written in ("false", "none", "{}", *row.neutral)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}[str(value).strip().lower()]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise TypeError(value)
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _wholes(value: Any) -> list[int]:
    values = json.loads(value) if isinstance(value, str) else value
    return [_whole(entry) for entry in (values if isinstance(values, list) else [values])]


def _any(value: Any) -> Any:
    return value


def _bool_or_error(value: Any) -> bool:
    try:
        return _bool(value)
    except KeyError:
        raise ValueError(value) from None


_READERS: Mapping[Kind, Callable[[Any], Any]] = MappingProxyType(
    {
        Kind.TEXT: _text,
        Kind.BOOL: _bool_or_error,
        Kind.WHOLE: _whole,
        Kind.NUMBER: _number,
        Kind.WHOLES: _wholes,
        Kind.ANY: _any,
    }
)
_MEANINGS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.TEXT: "a text",
        Kind.BOOL: "true or false",
        Kind.WHOLE: "a whole number",
        Kind.NUMBER: "a number",
        Kind.WHOLES: "a list of whole numbers",
    }
)
