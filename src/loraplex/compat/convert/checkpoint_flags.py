"""The flags of `loraplex convert-checkpoint`: those of TensorRT-LLM's convert_checkpoint.py.

Several families have their own script; the table has the flags of Llama's and GPT's.
"""

from typing import Final

from loraplex.compat.flags import FlagKind, FlagRow, here, ignored, refused

_TEXT, _WHOLE, _NUMBER = FlagKind.TEXT, FlagKind.WHOLE, FlagKind.NUMBER
_SWITCH, _TEXTS = FlagKind.SWITCH, FlagKind.TEXTS

DTYPES: Final = ("auto", "float32", "float16", "bfloat16")
META: Final = "Meta's own files are not read: give the Hugging Face folder (--model_dir)"
NEMO: Final = "NeMo checkpoints are not read: give a Hugging Face folder (--model_dir)"
_CALIBRATED = "calibrated checkpoints are not read: --use_weight_only needs no calibration"
_FROM_CONFIG = "the folder's config.json says it"
_EXPERTS = "mixtures of experts are not served"
_ONE_PROCESS = "one process serves the whole model: nothing is split"
_LOADING = "weights are read one tensor at a time"

MODEL_SIZES: Final = (
    *(
        ignored(name, _WHOLE, _FROM_CONFIG)
        for name in (
            *("vocab_size", "n_positions", "n_layer", "n_head", "n_kv_head", "n_embd"),
            *("inter_size", "ffn_dim_multiplier", "multiple_of"),
        )
    ),
    ignored("rms_norm_eps", _NUMBER, _FROM_CONFIG),
    ignored("rotary_base", _NUMBER, _FROM_CONFIG),
    ignored("rotary_pct", _NUMBER, _FROM_CONFIG),
    ignored("rotary_scaling", _TEXTS, _FROM_CONFIG),
    ignored("hidden_act", _TEXT, _FROM_CONFIG),
    ignored("gpt_variant", _TEXT, _FROM_CONFIG),
    ignored("model_version", _TEXT, _FROM_CONFIG),
    ignored("use_parallel_embedding", _SWITCH, _ONE_PROCESS),
    ignored("embedding_sharding_dim", _WHOLE, _ONE_PROCESS),
    ignored("use_embedding_sharing", _SWITCH, _FROM_CONFIG),
    ignored("moe_num_experts", _WHOLE, _EXPERTS),
    ignored("moe_top_k", _WHOLE, _EXPERTS),
    ignored("moe_renorm_mode", _WHOLE, _EXPERTS),
    ignored("moe_tp_size", _WHOLE, _EXPERTS),
    ignored("moe_ep_size", _WHOLE, _EXPERTS),
)
PRECISION: Final = (
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
    *(
        ignored(name, kind, "there is no calibration")
        for name, kind in (
            *(("calib_dataset", _TEXT), ("calib_batches", _WHOLE), ("calib_size", _WHOLE)),
            *(("calib_max_seq_length", _WHOLE), ("tokenizer_dir", _TEXT)),
        )
    ),
)
PARALLEL: Final = (
    here("tp_size", _WHOLE, "recorded; more than 1 runs as one process"),
    here("pp_size", _WHOLE, "recorded; more than 1 runs as one process"),
    ignored("cp_size", _WHOLE, _ONE_PROCESS),
)
SOURCES: Final = (
    here("model_dir", _TEXT, "a Hugging Face folder or hub id"),
    refused("meta_ckpt_dir", _TEXT, META),
    refused("nemo_ckpt_path", _TEXT, NEMO, "nemo_ckpt_dir"),
    refused("ft_model_dir", _TEXT, NEMO),
)
CHECKPOINT_FLAGS: Final[tuple[FlagRow, ...]] = (
    *SOURCES,
    here("output_dir", _TEXT, "the folder to write [tllm_checkpoint]"),
    here("dtype", _TEXT, "of the weights [float16]", choices=DTYPES),
    *PARALLEL,
    *MODEL_SIZES,
    *PRECISION,
    ignored("logits_dtype", _TEXT, "logits are 32 bits", choices=("float16", "float32")),
    ignored("load_by_shard", _SWITCH, _LOADING),
    ignored("load_model_on_cpu", _SWITCH, _LOADING),
    ignored("workers", _WHOLE, _LOADING),
    ignored("remove_duplicated_kv_heads", _SWITCH, _ONE_PROCESS),
    here("save_config_only", _SWITCH, "write no weights"),
    here("log_level", _TEXT, "info, warning, error ... [info]"),
)
