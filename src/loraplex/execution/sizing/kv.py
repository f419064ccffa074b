"""Number of KV blocks, and windows of layers, by the settings and the model."""

import dataclasses

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.kv_cache import block_bytes
from loraplex.memory.attention_window import AttentionWindow
from loraplex.models.attention import attention_shapes
from loraplex.models.spec import ModelSpec, with_attention_windows

_DEFAULT_KV_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class KVSize:
    max_model_len: int
    num_blocks: int
    num_host_blocks: int = 0
    attention_window: int | None = None
    """The field of core.plan.Capacity."""


def windowed(settings: RunnerSettings, spec: ModelSpec) -> ModelSpec:
    """Return the model with the operator's windows. Raises ConfigError."""
    windows, num_sinks = settings.max_attention_window_size, settings.sink_token_length
    if any(window < 1 for window in windows):
        raise ConfigError(
            f"max_attention_window_size must be at least 1 in every layer, got {windows}",
            param="max_attention_window_size",
        )
    if len(windows) > spec.num_layers:
        raise ConfigError(
            f"max_attention_window_size has {len(windows)} entries, the model {spec.num_layers} "
            "layers",
            param="max_attention_window_size",
        )
    spec = with_attention_windows(spec, windows, num_sinks)
    if num_sinks and not any(layer.attention.window for layer in spec.layers):
        raise ConfigError(
            f"sink_token_length {num_sinks} needs a window: set max_attention_window_size, too",
            param="sink_token_length",
        )
    return spec


def size_kv(settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype) -> KVSize:
    """dtype: of the KV cache. Raises ConfigError if one sequence of max_model_len does not fit."""
    max_model_len = wanted_model_len(settings, spec)
    per_block = block_bytes(attention_shapes(spec, settings.block_size), dtype)
    window = _window(settings, spec, max_model_len)
    per_sequence = window.max_blocks_held(max_model_len, settings.max_num_batched_tokens)
    useful = settings.max_num_seqs * per_sequence
    by_bytes = _blocks_by_bytes(settings, per_block, useful)
    capped = _blocks_by_tokens(settings)
    num_blocks = min(count for count in (by_bytes, capped) if count is not None)
    if num_blocks < per_sequence:
        if settings.max_model_len is not None or num_blocks == 0:
            raise _too_small(settings, spec, per_block, num_blocks, per_sequence)
        max_model_len = num_blocks * settings.block_size
        window = _window(settings, spec, max_model_len)
    return KVSize(
        max_model_len,
        num_blocks,
        _num_host_blocks(settings, per_block),
        window.num_tokens,
    )


def _window(settings: RunnerSettings, spec: ModelSpec, max_model_len: int) -> AttentionWindow:
    """Return the window; one that no sequence outgrows is none."""
    num_tokens = spec.attention_window
    if num_tokens is not None and num_tokens >= max_model_len:
        num_tokens = None
    return AttentionWindow(settings.block_size, num_tokens, settings.sink_token_length)


def _too_small(
    settings: RunnerSettings,
    spec: ModelSpec,
    per_block: int,
    num_blocks: int,
    per_sequence: int,
) -> ConfigError:
    """Return the error, which names the setting to change and the size that is needed."""
    max_model_len = wanted_model_len(settings, spec)
    capped = _blocks_by_tokens(settings)
    if capped == num_blocks:
        param, needed = "max_tokens_in_paged_kv_cache", per_sequence * settings.block_size
    else:
        param, needed = "kv_cache_bytes", per_sequence * per_block
    window = _window(settings, spec, max_model_len).num_tokens
    smaller = "max_model_len" if window is None else "max_attention_window_size"
    seen = "" if window is None else f" with a window of {window} and what one step computes"
    return ConfigError(
        f"the KV cache holds {num_blocks * settings.block_size} tokens, max_model_len is "
        f"{max_model_len}{seen}: set {param} to at least {needed}, or a smaller {smaller}"
        + ("" if settings.memory_bytes is None else ", or a larger memory_bytes"),
        param=param,
    )


def wanted_model_len(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Return the length, if the KV cache holds it. Raises ConfigError if it exceeds the model's."""
    longest = spec.default_max_model_len
    wanted = settings.max_model_len or longest
    if wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {longest} positions that the model has",
            param="max_model_len",
        )
    return wanted


def _blocks_by_bytes(settings: RunnerSettings, per_block: int, useful: int) -> int | None:
    """Return the number of blocks; None: only max_tokens_in_paged_kv_cache limits it."""
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes // per_block
    if settings.max_tokens_in_paged_kv_cache is not None:
        return None
    return min(useful, _DEFAULT_KV_BYTES // per_block)


def _blocks_by_tokens(settings: RunnerSettings) -> int | None:
    if settings.max_tokens_in_paged_kv_cache is None:
        return None
    return -(-settings.max_tokens_in_paged_kv_cache // settings.block_size)


def _num_host_blocks(settings: RunnerSettings, per_block: int) -> int:
    num_bytes = settings.kv_cache_host_memory_bytes
    if 0 < num_bytes < per_block:
        raise ConfigError(
            f"kv_cache_host_memory_bytes {num_bytes} does not hold one block of {per_block} bytes: "
            "set more, or 0 for none",
            param="kv_cache_host_memory_bytes",
        )
    return num_bytes // per_block
