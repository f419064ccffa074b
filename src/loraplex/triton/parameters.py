"""The `parameters` of a config.pbtxt: texts by key, read as the original backend reads them.

One table says of every key that the TensorRT-LLM backend knows what it does here.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loraplex.core.errors import ConfigError
from loraplex.triton.pbtxt import ModelConfigProto, is_placeholder


class Kind(enum.Enum):
    """How a text is read; what values there are, for errors."""

    TEXT = "a text"
    BOOL = "True, true, TRUE, 1, False, false, FALSE or 0"
    WHOLE = "a whole number"
    NUMBER = "a number"
    WHOLES = "whole numbers with commas between them"
    ANY = "any value"


class Effect(enum.Enum):
    SETTING = "takes effect as a setting"
    HERE = "takes effect"
    NONE = "accepted without effect"
    REFUSED = "refused unless it asks for nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterRow:
    """What one key does."""

    key: str
    kind: Kind
    effect: Effect
    setting: str = ""
    """Of SETTING: the field of ModelConfig."""
    reason: str = ""
    """Of NONE and REFUSED."""
    neutral: tuple[str, ...] = ()
    """Of REFUSED: the texts that ask for nothing."""


def _setting(key: str, kind: Kind, setting: str = "") -> ParameterRow:
    return ParameterRow(key, kind, Effect.SETTING, setting or key)


def _here(key: str, kind: Kind = Kind.TEXT) -> ParameterRow:
    return ParameterRow(key, kind, Effect.HERE)


def _none(key: str, reason: str, kind: Kind = Kind.TEXT) -> ParameterRow:
    return ParameterRow(key, kind, Effect.NONE, reason=reason)


def _refused(key: str, reason: str, *neutral: str) -> ParameterRow:
    return ParameterRow(key, Kind.TEXT, Effect.REFUSED, reason=reason, neutral=neutral)


_TENSORRT = "a setting of TensorRT's own"
_POLLING = "nothing is polled here: it is told at once"
_NODES = "one process serves a model"
_SPECULATION = "speculation here needs no second model: see num_draft_tokens"

TENSORRT_LLM_PARAMETERS = (
    _here("max_beam_width", Kind.WHOLE),
    _none("FORCE_CPU_ONLY_INPUT_TENSORS", "inputs come to the host's memory anyway"),
    _setting("gpt_model_type", Kind.TEXT, "batching"),
    _here("gpt_model_path"),
    _refused("encoder_model_path", "an encoder-decoder model"),
    _setting("max_tokens_in_paged_kv_cache", Kind.WHOLE),
    _setting("max_attention_window_size", Kind.WHOLES),
    _setting("sink_token_length", Kind.WHOLE),
    _setting("batch_scheduler_policy", Kind.TEXT),
    _setting("kv_cache_free_gpu_mem_fraction", Kind.NUMBER, "kv_cache_fraction"),
    _none("cross_kv_cache_fraction", "of encoder-decoder models", Kind.NUMBER),
    _setting("kv_cache_host_memory_bytes", Kind.WHOLE),
    _none("kv_cache_onboard_blocks", "KV on the host always comes back", Kind.BOOL),
    _setting("enable_trt_overlap", Kind.BOOL, "overlap"),
    _here("exclude_input_in_output", Kind.BOOL),
    _none("cancellation_check_period_ms", _POLLING, Kind.WHOLE),
    _none("stats_check_period_ms", _POLLING, Kind.WHOLE),
    _none("recv_poll_period_ms", _POLLING, Kind.WHOLE),
    _setting("iter_stats_max_iterations", Kind.WHOLE),
    _none("request_stats_max_iterations", "every answer carries its own times", Kind.WHOLE),
    _setting("enable_kv_cache_reuse", Kind.BOOL, "enable_prefix_cache"),
    _none("normalize_log_probs", "beams are compared by length_penalty", Kind.BOOL),
    _none("enable_chunked_context", "a long prompt is always computed in chunks", Kind.BOOL),
    _here("gpu_device_ids"),
    _none("participant_ids", _NODES),
    _none("num_nodes", _NODES, Kind.WHOLE),
    _setting("lora_cache_optimal_adapter_size", Kind.WHOLE, "optimal_lora_rank"),
    _setting("lora_cache_max_adapter_size", Kind.WHOLE, "max_lora_rank"),
    _setting("lora_cache_gpu_memory_fraction", Kind.NUMBER, "lora_device_fraction"),
    _setting("lora_cache_host_memory_bytes", Kind.WHOLE, "lora_host_bytes"),
    _here("lora_prefetch_dir"),
    _refused("decoding_mode", _SPECULATION, "top_k", "top_p", "top_k_top_p", "beam_search", "auto"),
    _none("executor_worker_path", _NODES),
    _none("worker_path", _NODES),
    _none("lookahead_window_size", _SPECULATION, Kind.WHOLE),
    _none("lookahead_ngram_size", _SPECULATION, Kind.WHOLE),
    _none("lookahead_verification_set_size", _SPECULATION, Kind.WHOLE),
    _none("medusa_choices", _SPECULATION),
    _none("eagle_choices", _SPECULATION),
    _none("speculative_decoding_fast_logits", _SPECULATION, Kind.BOOL),
    _none("gpu_weights_percent", "all weights are on the device", Kind.NUMBER),
    _none("enable_context_fmha_fp32_acc", "attention always sums in 32 bits", Kind.BOOL),
    _none("multi_block_mode", "long sequences are always split between blocks", Kind.BOOL),
    _setting("cuda_graph_mode", Kind.BOOL, "cuda_graphs"),
    _none("cuda_graph_cache_size", "see cuda_graph_batch_sizes", Kind.WHOLE),
    _here("tokenizer_dir"),
    _none("tokenizer_type", "the tokenizer's own files say what it is"),
    _none("guided_decoding_backend", "grammars are always served"),
    _none("xgrammar_tokenizer_info_path", "grammars use the model's own tokenizer"),
    _setting("max_num_sequences", Kind.WHOLE, "max_num_seqs"),
    _none("prompt_embedding_table_data_type", "prompt tuning is not served"),
    _none("input_timing_cache", _TENSORRT),
)


class Parameters:
    """The parameters of one model that somebody filled in."""

    def __init__(self, config: ModelConfigProto, path: Path) -> None:
        """path: of the file, for errors. An empty text and `${name}` count as not said."""
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

    def read(self, row: ParameterRow) -> Any:
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
