"""Puts a ModelRunner together from a model folder and the operator's settings."""

import functools
import logging
from pathlib import Path

import torch

from loraplex.core.plan import Capacity
from loraplex.execution.adapter_bank import AdapterBank, BaseEnds
from loraplex.execution.grammar.rows import GrammarRows
from loraplex.execution.grammar.vocabulary import VocabularySource
from loraplex.execution.host_adapters import HostAdapters
from loraplex.execution.kv_cache import KVCache
from loraplex.execution.kv_sizing import KVSize, windowed
from loraplex.execution.model_runner import ModelRunner, RunnerParts
from loraplex.execution.packed_cache import PackedCache
from loraplex.execution.packing import WeightFormat
from loraplex.execution.runner_settings import RunnerSettings
from loraplex.execution.sampling.sampler import Sampler
from loraplex.execution.sizing import (
    AdapterPoolSize,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    describe_memory,
    free_bytes,
    size_memory,
)
from loraplex.execution.weight_loading import load_weights
from loraplex.execution.weight_size import weights_size
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.attention import attention_shape
from loraplex.models.config import DecoderConfig, module_shapes
from loraplex.models.decoder import Decoder
from loraplex.models.registry import read_config
from loraplex.models.rope import RotaryTable

logger = logging.getLogger(__name__)


def load_runner(
    folder: Path,
    settings: RunnerSettings,
    host_adapters: HostAdapters,
    vocabulary: VocabularySource | None = None,
) -> ModelRunner:
    """Read the model in `folder`. Raises ConfigError, UnsupportedModelError.

    The adapters that plans copy to the device are taken from `host_adapters`. vocabulary: None,
    and no output can be kept to a grammar.
    """
    return ModelRunner(load_parts(folder, settings, host_adapters, vocabulary))


def load_parts(
    folder: Path,
    settings: RunnerSettings,
    host_adapters: HostAdapters,
    vocabulary: VocabularySource | None = None,
) -> RunnerParts:
    """As load_runner, before the parts are put together."""
    config = windowed(settings, read_config(folder))
    device, dtype = choose_device(settings), choose_dtype(settings, config)
    kv_dtype = choose_kv_dtype(settings, dtype)
    sizes = functools.partial(size_memory, settings, config, dtype=dtype, kv_dtype=kv_dtype)
    expected_bytes = weights_size(config, dtype, settings.quantization)
    free = free_bytes(device)
    # What cannot fit fails before the work.
    sizes(weights_bytes=expected_bytes, free_bytes=None if free is None else free - expected_bytes)
    kernels = select_kernels(device)
    form = WeightFormat(dtype=dtype, precision=settings.quantization, device=device)
    cache = _weights_cache(settings)
    weights = load_weights(folder, config, kernels, form, cache)
    size = sizes(weights_bytes=weights.num_bytes, free_bytes=free_bytes(device))
    kv_size, pool_size = size.kv, size.adapters
    logger.info("%s", describe_memory(weights.num_bytes, size, settings, config, kv_dtype))
    rotary = RotaryTable(config, kv_size.max_model_len, device)
    shape = attention_shape(config, settings.block_size)
    kv_cache = KVCache(
        kv_size.num_blocks,
        config.num_layers,
        shape,
        kv_dtype,
        kernels,
        num_host_blocks=kv_size.num_host_blocks,
    )
    decoder = Decoder(config, weights.parameters, rotary, kernels, block_size=settings.block_size)
    return RunnerParts(
        decoder=decoder,
        kv_cache=kv_cache,
        adapter_bank=_adapter_bank(decoder, pool_size, dtype, device),
        host_adapters=host_adapters,
        sampler=Sampler(
            config.vocab_size,
            device=device,
            kernels=kernels,
            grammars=GrammarRows(config.vocab_size, vocabulary),
            logits_dir=settings.logits_dir,
        ),
        capacity=_capacity(settings, config, kv_size, pool_size, kv_cache, weights.num_bytes),
        device=device,
    )


def _weights_cache(settings: RunnerSettings) -> PackedCache | None:
    if settings.weights_cache_dir is None:
        return None
    return PackedCache.usable(settings.weights_cache_dir, settings.weights_cache_bytes)


def _adapter_bank(
    decoder: Decoder, size: AdapterPoolSize, dtype: torch.dtype, device: torch.device
) -> AdapterBank:
    config = decoder.config
    return AdapterBank(
        size.geometry,
        size.num_pages,
        dtype=dtype,
        device=device,
        num_layers=config.num_layers,
        modules=module_shapes(config),
        ends=BaseEnds(
            config.vocab_size,
            config.hidden_size,
            config.tie_word_embeddings,
            decoder.base_linears,
        ),
    )


def _capacity(
    settings: RunnerSettings,
    config: DecoderConfig,
    kv_size: KVSize,
    pool_size: AdapterPoolSize,
    kv_cache: KVCache,
    weights_bytes: int,
) -> Capacity:
    return Capacity(
        block_size=settings.block_size,
        num_blocks=kv_size.num_blocks,
        num_host_blocks=kv_size.num_host_blocks,
        attention_window=kv_size.attention_window,
        num_sink_tokens=config.num_sink_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=kv_size.max_model_len,
        vocab_size=config.vocab_size,
        page_geometry=pool_size.geometry,
        num_adapter_pages=pool_size.num_pages,
        adapter_page_bytes=pool_size.page_bytes,
        keeps_host_copy=choose_device(settings).type != "cpu",
        kv_cache_bytes=kv_cache.num_bytes,
        weights_bytes=weights_bytes,
    )
