"""The flags of TensorRT-LLM's convert_checkpoint.py, trtllm-build and the older build.py scripts.

Several families have their own convert_checkpoint.py; the table has the flags of Llama's and GPT's.
"""

from collections.abc import Mapping
from typing import Any, Final

from loraplex.adapters.formats.modules import LORA_MODULES
from loraplex.compat.flags import FlagKind, FlagRow, here, ignored, refused

_TEXT, _WHOLE, _NUMBER = FlagKind.TEXT, FlagKind.WHOLE, FlagKind.NUMBER
_SWITCH, _PLUGIN, _TEXTS = FlagKind.SWITCH, FlagKind.PLUGIN, FlagKind.TEXTS
_IN_PLUGINS: Final[Mapping[str, Any]] = {"is_plugin": True}

DTYPES: Final = ("auto", "float32", "float16", "bfloat16")
META: Final = "Meta's own files are not read: give the Hugging Face folder (--model_dir)"
NEMO: Final = "NeMo checkpoints are not read: give a Hugging Face folder (--model_dir)"
_CALIBRATED = "calibrated checkpoints are not read: --use_weight_only needs no calibration"
_FROM_CONFIG = "the folder's config.json determines it"
_WHOLE_WEIGHTS = "weights are never stored divided: ranks divide them when they load"
_LOADING = "weights are read one tensor at a time"
_TENSORRT = "a setting of TensorRT's own"
_KERNELS = "the kernels of the machine are chosen when it is served"
_LOGITS = "every request may request logits"
_SPECULATION = "speculation needs no second model here: see num_draft_tokens"
_ALWAYS = "it is always so"
_BY_CONFIG = "models are chosen by config.json: nothing is imported"


def _ignored(kind: FlagKind, reason: str, names: str, **more: Any) -> tuple[FlagRow, ...]:
    """Return a row without effect for each word of `names`, which is NAME or NAME=ALIAS."""
    words = [word.split("=") for word in names.split()]
    return tuple(ignored(word[0], kind, reason, *word[1:], **more) for word in words)


_MODEL_SIZES = (
    *_ignored(_WHOLE, _FROM_CONFIG, "vocab_size n_positions n_layer n_head n_kv_head n_embd"),
    *_ignored(_WHOLE, _FROM_CONFIG, "inter_size ffn_dim_multiplier multiple_of"),
    *_ignored(_NUMBER, _FROM_CONFIG, "rms_norm_eps rotary_base rotary_pct"),
    ignored("rotary_scaling", _TEXTS, _FROM_CONFIG),
    *_ignored(_TEXT, _FROM_CONFIG, "hidden_act gpt_variant model_version"),
    ignored("use_parallel_embedding", _SWITCH, _WHOLE_WEIGHTS),
    ignored("embedding_sharding_dim", _WHOLE, _WHOLE_WEIGHTS),
    ignored("use_embedding_sharing", _SWITCH, _FROM_CONFIG),
    *_ignored(_WHOLE, _FROM_CONFIG, "moe_num_experts moe_top_k moe_renorm_mode"),
    *_ignored(_WHOLE, _WHOLE_WEIGHTS, "moe_tp_size moe_ep_size"),
)
_PRECISION = (
    here("use_weight_only", _SWITCH, "quantise the linear layers' weights"),
    here(
        *("weight_only_precision", _TEXT, "int8 (default) or int4"),
        choices=("int8", "int4", "int8_gptq", "int4_gptq", "int4_awq"),
    ),
    here("int8_kv_cache", _SWITCH, "keys and values in 8 bits"),
    refused("fp8_kv_cache", _SWITCH, "use --int8_kv_cache"),
    here("use_fp8", _SWITCH, "fp8 weights, which need a GPU", "enable_fp8"),
    here("use_fp8_rowwise", _SWITCH, "as --use_fp8"),
    ignored("use_meta_fp8_rowwise_recipe", _SWITCH, "all layers but lm_head are fp8"),
    refused("quant_ckpt_path", _TEXT, _CALIBRATED),
    ignored("group_size", _WHOLE, "int4 has a scale for each 128 inputs"),
    refused("per_group", _SWITCH, _CALIBRATED),
    refused("smoothquant", _NUMBER, _CALIBRATED, "sq"),
    ignored("per_channel", _SWITCH, "scales are always by output"),
    ignored("per_token", _SWITCH, "activations are not quantised"),
    *_ignored(_TEXT, "there is no calibration", "calib_dataset tokenizer_dir"),
    *_ignored(_WHOLE, "there is no calibration", "calib_batches calib_size calib_max_seq_length"),
)
_PARALLEL = (
    here("tp_size", _WHOLE, "recorded; the setting tensor_parallel_size divides a model"),
    here("pp_size", _WHOLE, "recorded; the setting pipeline_parallel_size divides a model"),
    ignored("cp_size", _WHOLE, _WHOLE_WEIGHTS),
)
_SOURCES = (
    here("model_dir", _TEXT, "a Hugging Face folder or hub id"),
    refused("meta_ckpt_dir", _TEXT, META),
    refused("nemo_ckpt_path", _TEXT, NEMO, "nemo_ckpt_dir"),
    refused("ft_model_dir", _TEXT, NEMO),
)
_LOG_LEVEL = here("log_level", _TEXT, "info, warning, error ... [info]")
_LOGITS_DTYPE = ignored("logits_dtype", _TEXT, "logits are 32 bits", choices=("float16", "float32"))
CHECKPOINT_FLAGS: Final[tuple[FlagRow, ...]] = (
    *_SOURCES,
    here("output_dir", _TEXT, "the folder to write [tllm_checkpoint]"),
    here("dtype", _TEXT, "type of the weights [float16]", choices=DTYPES),
    *_PARALLEL,
    *_MODEL_SIZES,
    *_PRECISION,
    _LOGITS_DTYPE,
    *_ignored(_SWITCH, _LOADING, "load_by_shard load_model_on_cpu"),
    ignored("workers", _WHOLE, _LOADING),
    ignored("remove_duplicated_kv_heads", _SWITCH, _WHOLE_WEIGHTS),
    here("save_config_only", _SWITCH, "write no weights"),
    _LOG_LEVEL,
)

_LIMITS = (
    here("max_batch_size", _WHOLE, "sequences in one step [2048]"),
    here("max_input_len", _WHOLE, "tokens of a prompt [max_seq_len]"),
    here("max_seq_len", _WHOLE, "tokens of prompt and output [the model's]", "max_decoder_seq_len"),
    here("max_output_len", _WHOLE, "with --max_input_len: their sum is max_seq_len"),
    here("max_beam_width", _WHOLE, "beams of a beam search [1]"),
    here("max_num_tokens", _WHOLE, "tokens in one step [8192]"),
    ignored("opt_num_tokens", _WHOLE, _TENSORRT),
    ignored("max_encoder_input_len", _WHOLE, "the model and one step limit an encoder's input"),
    ignored(
        *("max_prompt_embedding_table_size", _WHOLE, "prompt tuning is not served"),
        "max_multimodal_len",
    ),
)
_LORA = (
    here(
        *("lora_plugin", _PLUGIN, "adapters are served; without it none are", "use_lora_plugin"),
        **_IN_PLUGINS,
    ),
    here("lora_dir", _TEXTS, "PEFT folders that are served by their names", "hf_lora_dir"),
    here("lora_ckpt_source", _TEXT, "hf", choices=("hf", "nemo")),
    here(
        *("lora_target_modules", _TEXTS, "modules that adapters may change [the first adapter's]"),
        choices=tuple(module.name for module in LORA_MODULES),
    ),
    here("max_lora_rank", _WHOLE, "largest rank of an adapter [64]"),
)
_PLUGINS = (
    *_ignored(
        *(_PLUGIN, _KERNELS),
        "gpt_attention_plugin=use_gpt_attention_plugin gemm_plugin=use_gemm_plugin "
        "rmsnorm_plugin=use_rmsnorm_plugin layernorm_plugin=use_layernorm_plugin "
        "lookup_plugin=use_lookup_plugin bert_attention_plugin moe_plugin mamba_conv1d_plugin "
        "nccl_plugin gemm_swiglu_plugin fp8_rowwise_gemm_plugin low_latency_gemm_plugin "
        "low_latency_gemm_swiglu_plugin gemm_allreduce_plugin identity_plugin",
        **_IN_PLUGINS,
    ),
    *_ignored(_SWITCH, _ALWAYS, "paged_kv_cache remove_input_padding", **_IN_PLUGINS),
    ignored("tokens_per_block", _WHOLE, "block_size of the server decides", **_IN_PLUGINS),
    *_ignored(_SWITCH, "see sink_token_length", "streamingllm=enable_streamingllm", **_IN_PLUGINS),
    *_ignored(
        *(_SWITCH, _KERNELS),
        "context_fmha=enable_context_fmha context_fmha_fp32_acc=enable_context_fmha_fp32_acc "
        "bert_context_fmha_fp32_acc reduce_fusion user_buffer use_custom_all_reduce "
        "multi_block_mode enable_xqa attention_qk_half_accumulation use_paged_context_fmha "
        "use_fp8_context_fmha fuse_fp4_quant multiple_profiles paged_state "
        "use_context_fmha_for_generation use_fused_mlp norm_quant_fusion pp_reduce_scatter",
        **_IN_PLUGINS,
    ),
)
_WITHOUT_EFFECT = (
    ignored(
        *("kv_cache_type", _TEXT, "the KV cache is always paged"),
        choices=("continuous", "paged", "disabled"),
    ),
    ignored("use_inflight_batching", _SWITCH, "gpt_model_type of the repository decides"),
    _LOGITS_DTYPE,
    *_ignored(
        *(_SWITCH, _LOGITS),
        "gather_context_logits gather_generation_logits gather_all_token_logits",
    ),
    ignored("speculative_decoding_mode", _TEXT, _SPECULATION),
    ignored("max_draft_len", _WHOLE, _SPECULATION),
    *_ignored(
        *(_SWITCH, _TENSORRT),
        "weight_sparsity weight_streaming strip_plan fast_build auto_parallel_enable "
        "enable_debug_output visualize_network visualize monitor_memory parallel_build "
        "strongly_typed disable_weight_only_quant_plugin use_strip_plan refit",
    ),
    *_ignored(
        *(_TEXT, _TENSORRT),
        "input_timing_cache output_timing_cache timing_cache profiling_verbosity cluster_key "
        "builder_opt builder_force_num_profiles",
    ),
    *_ignored(_WHOLE, "one process serves the whole model", "auto_parallel gpus_per_node"),
    ignored("workers", _WHOLE, "weights are packed by all threads"),
    ignored("random_seed", _WHOLE, "nothing is drawn"),
)
BUILD_FLAGS: Final[tuple[FlagRow, ...]] = (
    here("checkpoint_dir", _TEXT, "a folder of convert-checkpoint"),
    *_SOURCES,
    here("build_config", _TEXT, "a JSON file of build settings; flags come before it"),
    here("output_dir", _TEXT, "the folder to write [engine_outputs]"),
    here(
        *("dtype", _TEXT, "type of the weights; build.py's, with --model_dir [float16]"),
        choices=DTYPES,
    ),
    here("world_size", _WHOLE, "must be tp_size times pp_size"),
    *_PARALLEL,
    *_LIMITS,
    *_LORA,
    *_PLUGINS,
    *_PRECISION,
    *_MODEL_SIZES,
    *_WITHOUT_EFFECT,
    refused("model_config", _TEXT, "an engine without weights cannot be served: --checkpoint_dir"),
    refused("model_cls_file", _TEXT, _BY_CONFIG),
    refused("model_cls_name", _TEXT, _BY_CONFIG),
    here("dry_run", _SWITCH, "check everything and write nothing"),
    _LOG_LEVEL,
)
