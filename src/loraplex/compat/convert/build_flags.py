"""The flags of `loraplex build`: those of trtllm-build, and of the older build.py scripts."""

from typing import Any, Final

from loraplex.adapters.formats.modules import LORA_MODULES
from loraplex.compat.convert.checkpoint_flags import (
    DTYPES,
    MODEL_SIZES,
    PARALLEL,
    PRECISION,
    SOURCES,
)
from loraplex.compat.flags import FlagKind, FlagRow, FlagSection, here, ignored, refused

_TEXT, _WHOLE, _NUMBER = FlagKind.TEXT, FlagKind.WHOLE, FlagKind.NUMBER
_SWITCH, _PLUGIN, _TEXTS = FlagKind.SWITCH, FlagKind.PLUGIN, FlagKind.TEXTS
_OWN = FlagSection.OWN

_TENSORRT = "a setting of TensorRT's own"
_KERNELS = "the kernels of the machine are chosen when it is served"
_LOGITS = "logits are there for every request that asks"
_SPECULATION = "speculation needs no second model here: see num_draft_tokens"
_ALWAYS = "it is always so"


def _plugin(name: str, *aliases: str) -> FlagRow:
    return ignored(name, _PLUGIN, _KERNELS, *aliases, section=FlagSection.PLUGIN)


def _feature(name: str, *aliases: str, reason: str = _KERNELS, kind: Any = _SWITCH) -> FlagRow:
    return ignored(name, kind, reason, *aliases, section=FlagSection.PLUGIN)


_LIMITS = (
    here("max_batch_size", _WHOLE, "sequences in one step [2048]"),
    here("max_input_len", _WHOLE, "tokens of a prompt [max_seq_len]"),
    here(
        *("max_seq_len", _WHOLE, "tokens of prompt and output [the model's]"),
        "max_decoder_seq_len",
    ),
    here("max_output_len", _WHOLE, "with --max_input_len: their sum is max_seq_len"),
    here("max_beam_width", _WHOLE, "beams of a search [1]"),
    here("max_num_tokens", _WHOLE, "tokens in one step [8192]"),
    ignored("opt_num_tokens", _WHOLE, _TENSORRT),
    ignored("max_encoder_input_len", _WHOLE, "encoder-decoder models are not served"),
    ignored(
        *("max_prompt_embedding_table_size", _WHOLE, "prompt tuning is not served"),
        "max_multimodal_len",
    ),
)
_LORA = (
    here(
        *("lora_plugin", _PLUGIN, "adapters are served; without it none are"),
        "use_lora_plugin",
        section=FlagSection.PLUGIN,
    ),
    here("lora_dir", _TEXTS, "PEFT folders that are served by their names", "hf_lora_dir"),
    here("lora_ckpt_source", _TEXT, "hf", choices=("hf", "nemo")),
    here(
        *("lora_target_modules", _TEXTS, "what adapters may change [the first --lora_dir's]"),
        choices=tuple(module.name for module in LORA_MODULES),
    ),
    here("max_lora_rank", _WHOLE, "largest rank of an adapter [64]"),
)
_PLUGINS = (
    _plugin("gpt_attention_plugin", "use_gpt_attention_plugin"),
    _plugin("gemm_plugin", "use_gemm_plugin"),
    _plugin("rmsnorm_plugin", "use_rmsnorm_plugin"),
    _plugin("layernorm_plugin", "use_layernorm_plugin"),
    _plugin("lookup_plugin", "use_lookup_plugin"),
    *(
        _plugin(name)
        for name in (
            *("bert_attention_plugin", "moe_plugin", "mamba_conv1d_plugin", "nccl_plugin"),
            *("gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin", "low_latency_gemm_plugin"),
            *("low_latency_gemm_swiglu_plugin", "gemm_allreduce_plugin", "identity_plugin"),
        )
    ),
)
_FEATURES = (
    _feature("context_fmha", "enable_context_fmha"),
    _feature("context_fmha_fp32_acc", "enable_context_fmha_fp32_acc"),
    _feature("paged_kv_cache", reason=_ALWAYS),
    _feature("remove_input_padding", reason=_ALWAYS),
    _feature("tokens_per_block", kind=_WHOLE, reason="block_size of the server decides"),
    _feature("streamingllm", "enable_streamingllm", reason="see sink_token_length"),
    *(
        _feature(name)
        for name in (
            *("bert_context_fmha_fp32_acc", "reduce_fusion", "user_buffer"),
            *("use_custom_all_reduce", "multi_block_mode", "enable_xqa"),
            *("attention_qk_half_accumulation", "use_paged_context_fmha"),
            *("use_fp8_context_fmha", "fuse_fp4_quant", "multiple_profiles", "paged_state"),
            *("use_context_fmha_for_generation", "use_fused_mlp", "norm_quant_fusion"),
            "pp_reduce_scatter",
        )
    ),
)
_WITHOUT_EFFECT = (
    ignored(
        *("kv_cache_type", _TEXT, "the KV cache is always paged"),
        choices=("continuous", "paged", "disabled"),
    ),
    ignored("use_inflight_batching", _SWITCH, "gpt_model_type of the repository decides"),
    ignored("logits_dtype", _TEXT, "logits are 32 bits", choices=("float16", "float32")),
    ignored("gather_context_logits", _SWITCH, _LOGITS),
    ignored("gather_generation_logits", _SWITCH, _LOGITS),
    ignored("gather_all_token_logits", _SWITCH, _LOGITS),
    ignored("speculative_decoding_mode", _TEXT, _SPECULATION),
    ignored("max_draft_len", _WHOLE, _SPECULATION),
    *(
        ignored(name, _SWITCH, _TENSORRT)
        for name in (
            *("weight_sparsity", "weight_streaming", "strip_plan", "fast_build"),
            *("auto_parallel_enable", "enable_debug_output", "visualize_network"),
            *("visualize", "monitor_memory", "parallel_build", "strongly_typed"),
            *("disable_weight_only_quant_plugin", "use_strip_plan", "refit"),
        )
    ),
    *(
        ignored(name, _TEXT, _TENSORRT)
        for name in (
            *("input_timing_cache", "output_timing_cache", "timing_cache"),
            *("profiling_verbosity", "cluster_key", "builder_opt", "builder_force_num_profiles"),
        )
    ),
    ignored("auto_parallel", _WHOLE, "one process serves the whole model"),
    ignored("gpus_per_node", _WHOLE, "one process serves the whole model"),
    ignored("workers", _WHOLE, "weights are packed by all threads"),
    ignored("random_seed", _WHOLE, "nothing is drawn"),
)
BUILD_FLAGS: Final[tuple[FlagRow, ...]] = (
    here("checkpoint_dir", _TEXT, "a folder of convert-checkpoint", section=_OWN),
    *SOURCES,
    here("build_config", _TEXT, "a JSON file of build settings; flags come before it"),
    here("output_dir", _TEXT, "the folder to write [engine_outputs]"),
    here("dtype", _TEXT, "of the weights; build.py's, with --model_dir [float16]", choices=DTYPES),
    here("world_size", _WHOLE, "must be tp_size times pp_size"),
    *PARALLEL,
    *_LIMITS,
    *_LORA,
    *_PLUGINS,
    *_FEATURES,
    *PRECISION,
    *MODEL_SIZES,
    *_WITHOUT_EFFECT,
    refused("model_config", _TEXT, "an engine without weights cannot be served: --checkpoint_dir"),
    refused("model_cls_file", _TEXT, "models are chosen by config.json: nothing is imported"),
    refused("model_cls_name", _TEXT, "models are chosen by config.json: nothing is imported"),
    here("dry_run", _SWITCH, "check everything and write nothing"),
    here("log_level", _TEXT, "info, warning, error ... [info]"),
)
