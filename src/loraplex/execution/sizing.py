"""How much fits: from settings and model sizes to numbers of blocks and adapter pages."""

import dataclasses
from pathlib import Path

import torch

from loraplex.core.adapter import LoraTarget
from loraplex.core.errors import ConfigError
from loraplex.core.plan import PageGeometry
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.kv_cache import block_bytes
from loraplex.kernels.ops import AttentionShape
from loraplex.memory.adapter_pages import (
    page_geometry,
    pages_for_bytes,
    pages_at_rank,
)
from loraplex.models.config import DecoderConfig, module_shapes

_DEFAULT_KV_BYTES = 2 << 30
_DEFAULT_ADAPTER_BYTES = 256 << 20
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KV_DTYPES = {**_DTYPES, "int8": torch.int8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """What the operator decides about one model's engine."""

    dtype: str = "auto"
    """auto is the checkpoint's own."""
    kv_dtype: str = "auto"
    """Of stored keys and values; auto is the model's."""
    device: str = "cpu"
    quantization: WeightPrecision = WeightPrecision.NATIVE
    weights_cache_dir: Path | None = None
    """Where packed weights are kept for the next start; None: nowhere."""
    weights_cache_bytes: int = 64 << 30
    max_model_len: int | None = None
    """None: what the model was made for, or less if the KV cache holds less."""
    max_num_seqs: int = 64
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """None: room for max_num_seqs sequences of max_model_len, at most 2 GiB."""
    num_blocks: int | None = None
    """Instead of kv_cache_bytes."""
    max_lora_rank: int = 64
    optimal_lora_rank: int = 8
    """An adapter of this rank on every module takes one page."""
    lora_device_bytes: int | None = None
    """None: 256 MiB, and never less than one adapter of max_lora_rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVSize:
    max_model_len: int
    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterPoolSize:
    geometry: PageGeometry
    num_pages: int
    page_bytes: int


def choose_dtype(settings: RunnerSettings, config: DecoderConfig) -> torch.dtype:
    """float32 for a checkpoint that does not tell its own."""
    name = config.dtype or "float32" if settings.dtype == "auto" else settings.dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is none of auto, {', '.join(_DTYPES)}", param="dtype")
    return _DTYPES[name]


def choose_kv_dtype(settings: RunnerSettings, dtype: torch.dtype) -> torch.dtype:
    """dtype: the model's."""
    if settings.kv_dtype == "auto":
        return dtype
    if settings.kv_dtype not in _KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {settings.kv_dtype!r} is none of auto, {', '.join(_KV_DTYPES)}",
            param="kv_dtype",
        )
    return _KV_DTYPES[settings.kv_dtype]


def choose_device(settings: RunnerSettings) -> torch.device:
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device", param="device")
    return device


def size_kv(
    settings: RunnerSettings, config: DecoderConfig, shape: AttentionShape, dtype: torch.dtype
) -> KVSize:
    """dtype: of the KV cache. Raises ConfigError if one sequence of max_model_len does not fit."""
    max_model_len = _wanted_model_len(settings, config)
    per_sequence = -(-max_model_len // shape.block_size)
    num_blocks = _num_blocks(settings, config, shape, dtype, settings.max_num_seqs * per_sequence)
    if num_blocks >= per_sequence:
        return KVSize(max_model_len, num_blocks)
    held = num_blocks * shape.block_size
    if settings.max_model_len is None and held > 0:
        return KVSize(held, num_blocks)
    needed = per_sequence * block_bytes(config.num_layers, shape, dtype)
    raise ConfigError(
        f"the KV cache holds {held} tokens, max_model_len is {max_model_len}: set kv_cache_bytes "
        f"to at least {needed}, or a smaller max_model_len",
        param="kv_cache_bytes",
    )


def _wanted_model_len(settings: RunnerSettings, config: DecoderConfig) -> int:
    longest = config.default_max_model_len
    wanted = settings.max_model_len or longest
    if wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {longest} positions that the model has",
            param="max_model_len",
        )
    return wanted


def _num_blocks(
    settings: RunnerSettings,
    config: DecoderConfig,
    shape: AttentionShape,
    dtype: torch.dtype,
    useful: int,
) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    per_block = block_bytes(config.num_layers, shape, dtype)
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes // per_block
    return min(useful, _DEFAULT_KV_BYTES // per_block)


def size_adapter_pool(
    settings: RunnerSettings, config: DecoderConfig, dtype: torch.dtype
) -> AdapterPoolSize:
    """Raises ConfigError if one adapter of max_lora_rank on all modules does not fit."""
    targets = [
        LoraTarget(layer, module, settings.max_lora_rank, in_features, out_features)
        for layer in range(config.num_layers)
        for module, (in_features, out_features) in module_shapes(config).items()
    ]
    max_rank = settings.max_lora_rank
    optimal_rank = min(settings.optimal_lora_rank, max_rank)
    geometry = page_geometry(targets, optimal_rank=optimal_rank, max_rank=max_rank)
    page_bytes = geometry.page_elements * dtype.itemsize
    needed = pages_at_rank(targets, max_rank, geometry)
    if settings.lora_device_bytes is None:
        default = pages_for_bytes(_DEFAULT_ADAPTER_BYTES, geometry, dtype.itemsize)
        return AdapterPoolSize(geometry, max(default, needed), page_bytes)
    num_pages = pages_for_bytes(settings.lora_device_bytes, geometry, dtype.itemsize)
    if num_pages < needed:
        raise ConfigError(
            f"lora_device_bytes {settings.lora_device_bytes} does not hold one adapter of rank "
            f"{max_rank} on all modules: set at least {needed * page_bytes}",
            param="lora_device_bytes",
        )
    return AdapterPoolSize(geometry, num_pages, page_bytes)
