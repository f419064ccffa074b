"""Roles of the models of a repository, and their parameters: a table for each role states what they
do."""

import difflib
import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from loraplex.compat.triton.model_folder import ModelFolder, Notes, is_placeholder
from loraplex.compat.triton.setting_rows import Kind, SettingRow, here, no_effect, refused, setting
from loraplex.core.errors import ConfigError
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.kinds import (
    BLS,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    VLLM,
    ModelKind,
)


class Role(enum.Enum):
    ENSEMBLE = "ensemble"
    PREPROCESSING = "preprocessing"
    TENSORRT_LLM = "tensorrt_llm"
    POSTPROCESSING = "postprocessing"
    BLS = "tensorrt_llm_bls"
    VLLM = "vllm"


KINDS: Mapping[Role, ModelKind] = MappingProxyType(
    {
        Role.ENSEMBLE: ENSEMBLE,
        Role.PREPROCESSING: PREPROCESSING,
        Role.TENSORRT_LLM: TENSORRT_LLM,
        Role.POSTPROCESSING: POSTPROCESSING,
        Role.BLS: BLS,
        Role.VLLM: VLLM,
    }
)
_BY_INPUTS = (
    ({"QUERY"}, Role.PREPROCESSING),
    ({"TOKENS_BATCH"}, Role.POSTPROCESSING),
    ({"input_ids", "request_output_len"}, Role.TENSORRT_LLM),
    ({"text_input", "max_tokens"}, Role.BLS),
)
_LLM_API_FILE = "model.yaml"


def role_of(folder: ModelFolder) -> Role:
    """Raises ConfigError for a model that is none of those that are served."""
    config = folder.config
    if config.platform == "ensemble":
        return Role.ENSEMBLE
    if config.backend == "vllm":
        return Role.VLLM
    if config.backend == "tensorrtllm":
        return Role.TENSORRT_LLM
    if (folder.version_path / _LLM_API_FILE).is_file():
        raise ConfigError(
            f"{folder.version_path / _LLM_API_FILE}: a model of TensorRT-LLM's LLM API is not "
            "served from a repository; give its folder to `loraplex serve`"
        )
    if config.backend == "python" or not config.backend or is_placeholder(config.backend):
        names = {row.name for row in config.input}
        role = next((role for needed, role in _BY_INPUTS if needed <= names), None)
        if role is not None:
            return role
    what = f"platform {config.platform!r}" if config.platform else f"backend {config.backend!r}"
    raise ConfigError(
        f"{folder.line_of('platform' if config.platform else 'backend')}: model '{folder.name}' of "
        f"{what} is not served; supported: ensembles, the backends tensorrtllm and vllm, and "
        "with the backend python TensorRT-LLM's preprocessing (input QUERY), postprocessing (input "
        "TOKENS_BATCH), tensorrt_llm (input_ids, request_output_len) and tensorrt_llm_bls "
        "(text_input, max_tokens)"
    )


_POLLING = "it is notified at once, without polling"
_NODES = "one process serves a model"
_SPECULATION = "speculation here needs no second model: see num_draft_tokens"

TENSORRT_LLM_PARAMETERS = (
    here("max_beam_width", Kind.WHOLE, "the largest `beam_width` of a request"),
    no_effect("FORCE_CPU_ONLY_INPUT_TENSORS", "inputs come to the host's memory anyway", Kind.TEXT),
    setting("gpt_model_type", Kind.TEXT, "batching"),
    here(
        "gpt_model_path",
        Kind.TEXT,
        "the model: a Hugging Face folder, or one of `loraplex compat build`",
    ),
    no_effect("encoder_model_path", "the folder of gpt_model_path has the encoder", Kind.TEXT),
    setting("max_tokens_in_paged_kv_cache", Kind.WHOLE),
    setting("max_attention_window_size", Kind.WHOLES),
    setting("max_kv_cache_length", Kind.WHOLES, "max_attention_window_size"),
    setting("sink_token_length", Kind.WHOLE),
    setting("batch_scheduler_policy", Kind.TEXT),
    setting("kv_cache_free_gpu_mem_fraction", Kind.NUMBER, "kv_cache_fraction"),
    no_effect("cross_kv_cache_fraction", "the encoder's part is sized by itself", Kind.NUMBER),
    setting("kv_cache_host_memory_bytes", Kind.WHOLE),
    no_effect("kv_cache_onboard_blocks", "KV on the host always comes back", Kind.BOOL),
    setting("enable_trt_overlap", Kind.BOOL, "overlap"),
    here(
        "exclude_input_in_output",
        Kind.BOOL,
        "outputs without their prompts, unless a request sets it",
    ),
    no_effect("cancellation_check_period_ms", _POLLING, Kind.WHOLE),
    no_effect("stats_check_period_ms", _POLLING, Kind.WHOLE),
    no_effect("recv_poll_period_ms", _POLLING, Kind.WHOLE),
    setting("iter_stats_max_iterations", Kind.WHOLE),
    no_effect("request_stats_max_iterations", "every response carries its own times", Kind.WHOLE),
    setting("enable_kv_cache_reuse", Kind.BOOL, "enable_prefix_cache"),
    no_effect("normalize_log_probs", "beams are compared by length_penalty", Kind.BOOL),
    no_effect("enable_chunked_context", "a long prompt is always computed in chunks", Kind.BOOL),
    here("gpu_device_ids", Kind.TEXT, "the first of them serves the model"),
    no_effect("participant_ids", _NODES),
    no_effect("num_nodes", _NODES, Kind.WHOLE),
    setting("lora_cache_optimal_adapter_size", Kind.WHOLE, "optimal_lora_rank"),
    setting("lora_cache_max_adapter_size", Kind.WHOLE, "max_lora_rank"),
    setting("lora_cache_gpu_memory_fraction", Kind.NUMBER, "lora_device_fraction"),
    setting("lora_cache_host_memory_bytes", Kind.WHOLE, "lora_host_bytes"),
    here("lora_prefetch_dir", Kind.TEXT, "a followed folder of adapters"),
    refused("decoding_mode", _SPECULATION, "top_k", "top_p", "top_k_top_p", "beam_search", "auto"),
    no_effect("executor_worker_path", _NODES),
    no_effect("worker_path", _NODES),
    no_effect("lookahead_window_size", _SPECULATION, Kind.WHOLE),
    no_effect("lookahead_ngram_size", _SPECULATION, Kind.WHOLE),
    no_effect("lookahead_verification_set_size", _SPECULATION, Kind.WHOLE),
    no_effect("medusa_choices", _SPECULATION),
    no_effect("eagle_choices", _SPECULATION),
    no_effect("speculative_decoding_fast_logits", _SPECULATION, Kind.BOOL),
    no_effect("gpu_weights_percent", "all weights are on the device", Kind.NUMBER),
    no_effect("enable_context_fmha_fp32_acc", "attention always sums in 32 bits", Kind.BOOL),
    no_effect("multi_block_mode", "long sequences are always split between blocks", Kind.BOOL),
    setting("cuda_graph_mode", Kind.BOOL, "cuda_graphs"),
    no_effect("cuda_graph_cache_size", "see cuda_graph_batch_sizes", Kind.WHOLE),
    here(
        "tokenizer_dir", Kind.TEXT, "the tokenizer of the model and of its pre- and postprocessing"
    ),
    no_effect("guided_decoding_backend", "grammars are always served"),
    no_effect("xgrammar_tokenizer_info_path", "grammars use the model's own tokenizer"),
    setting("max_num_sequences", Kind.WHOLE, "max_num_seqs"),
    here(
        "clamp_token_ids",
        Kind.BOOL,
        "`input_ids` beyond the vocabulary, as the random ones of `benchmark_core_model.py "
        "token-norm-dist`, become the nearest id in it [false: refused]",
        is_ours=True,
    ),
)

_TOKENIZER = here(
    "tokenizer_dir", Kind.TEXT, "the tokenizer; all models of one base must mean the same"
)
_TOKENIZER_TYPE = no_effect("tokenizer_type", "the tokenizer's own files determine its type")
_MULTIMODAL = "a multimodal model"

PART_PARAMETERS: Mapping[Role, tuple[SettingRow, ...]] = MappingProxyType(
    {
        Role.PREPROCESSING: (
            _TOKENIZER,
            _TOKENIZER_TYPE,
            here("add_special_tokens", Kind.TEXT, "to a prompt; yes or no in several words [yes]"),
            refused("multimodal_model_path", _MULTIMODAL),
            no_effect("gpt_model_path", "of multimodal models"),
            no_effect("max_num_images", "of multimodal models"),
        ),
        Role.POSTPROCESSING: (
            _TOKENIZER,
            _TOKENIZER_TYPE,
            here("skip_special_tokens", Kind.TEXT, "in texts; yes or no in several words [yes]"),
        ),
        Role.BLS: (
            here("accumulate_tokens", Kind.TEXT, "every streamed text is the whole so far [no]"),
            here("tensorrt_llm_model_name", Kind.TEXT, "the model that it calls [tensorrt_llm]"),
            here(
                "tensorrt_llm_draft_model_name",
                Kind.TEXT,
                "lets requests set num_draft_tokens; no draft model is needed",
            ),
            refused("multimodal_encoders_name", _MULTIMODAL),
        ),
        Role.ENSEMBLE: (),
        Role.VLLM: (
            here(
                "ENABLE_VLLM_HEALTH_CHECK",
                Kind.TEXT,
                "true: while the engine is dead, requests are refused at once, and the model "
                "is not ready",
            ),
            here(
                "REPORT_CUSTOM_METRICS", Kind.TEXT, "true: the vllm:* families that count requests"
            ),
        ),
    }
)


def check_known(folder: ModelFolder, rows: Sequence[SettingRow], notes: Notes) -> None:
    """Note unknown parameters. Raises ConfigError for one that is similar to a known one."""
    known = [row.key for row in rows]
    for key in folder.parameters.keys:
        if key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if close:
            raise folder.parameters.error(
                key, f"there is no such parameter; did you mean {close[0]}?"
            )
        notes.warning(f"{folder.parameters.place(key)}: parameter {key} is not known: no effect")


def check_served(folder: ModelFolder, rows: Sequence[SettingRow], notes: Notes) -> None:
    """Note what has no effect. Raises ConfigError for what is refused."""
    for row in rows:
        value = folder.parameters.text(row.key)
        if value is None:
            continue
        if row.support is Support.NO_EFFECT:
            notes.info(f"{folder.name}: {row.key} has no effect: {row.reason}")
        if row.support is Support.REFUSED and value not in row.neutral:
            neutral = f"; leave it out or set {', '.join(row.neutral)}" if row.neutral else ""
            reason = f"{value}: {row.reason}, is not served{neutral}"
            raise folder.parameters.error(row.key, reason)
