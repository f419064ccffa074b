"""The `parameters` of a config.pbtxt: texts by key, read as the original backend reads them.

One table states what every key of the TensorRT-LLM backend does here.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loraplex.compat.triton.pbtxt import ModelConfigProto, is_placeholder
from loraplex.compat.triton.setting_rows import Kind, SettingRow, here, no_effect, refused, setting
from loraplex.core.errors import ConfigError

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
    refused("encoder_model_path", "an encoder-decoder model"),
    setting("max_tokens_in_paged_kv_cache", Kind.WHOLE),
    setting("max_attention_window_size", Kind.WHOLES),
    setting("max_kv_cache_length", Kind.WHOLES, "max_attention_window_size"),
    setting("sink_token_length", Kind.WHOLE),
    setting("batch_scheduler_policy", Kind.TEXT),
    setting("kv_cache_free_gpu_mem_fraction", Kind.NUMBER, "kv_cache_fraction"),
    no_effect("cross_kv_cache_fraction", "of encoder-decoder models", Kind.NUMBER),
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


class Parameters:
    """Parameters of one model that are filled in."""

    def __init__(self, config: ModelConfigProto, path: Path) -> None:
        """path: of the file, for errors. An empty text and `${name}` count as not set."""
        self._path = path
        self._texts = {
            key: parameter.string_value.strip()
            for key, parameter in config.parameters.items()
            if parameter.string_value.strip() and not is_placeholder(parameter.string_value)
        }

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    @property
    def keys(self) -> list[str]:
        return list(self._texts)

    def text(self, key: str) -> str | None:
        return self._texts.get(key)

    def read(self, row: SettingRow) -> Any:
        """None if it was not said. Raises ConfigError with the file, the line, what is allowed."""
        text = self._texts.get(row.key)
        if text is None:
            return None
        try:
            return _READERS[row.kind](text)
        except ValueError:
            raise self.error(row.key, f"{text!r} is not {row.kind.value}") from None

    def place(self, key: str) -> str:
        """Where a key is written, as a layer of settings calls its source."""
        return f"{self._path}, line {self._line(key)}"

    def error(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self.place(key)}: {key}: {reason}")

    def _line(self, key: str) -> int:
        """Where the key is written; 1 if it cannot be found."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        written = re.compile(rf"""key\s*:\s*["']{re.escape(key)}["']""")
        return next((i for i, line in enumerate(lines, start=1) if written.search(line)), 1)


def _read_bool(text: str) -> bool:
    words = {"True": True, "true": True, "TRUE": True, "1": True}
    words |= {"False": False, "false": False, "FALSE": False, "0": False}
    if text not in words:
        raise ValueError(text)
    return words[text]


def _read_wholes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_READERS: Mapping[Kind, Callable[[str], Any]] = {
    Kind.TEXT: str,
    Kind.BOOL: _read_bool,
    Kind.WHOLE: int,
    Kind.NUMBER: float,
    Kind.WHOLES: _read_wholes,
    Kind.ANY: str,
}
