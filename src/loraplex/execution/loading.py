"""Puts a ModelRunner together from a model folder and the operator's settings."""

from pathlib import Path

import torch

from loraplex.core.plan import Capacity
from loraplex.execution.adapter_bank import AdapterBank
from loraplex.execution.host_adapters import HostAdapters
from loraplex.execution.kv_cache import KVCache
from loraplex.execution.model_runner import ModelRunner, RunnerParts
from loraplex.execution.sampler import Sampler
from loraplex.execution.sizing import (
    AdapterPoolSize,
    KVSize,
    RunnerSettings,
    choose_device,
    choose_dtype,
    size_adapter_pool,
    size_kv,
)
from loraplex.execution.weights import load_parameters
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.attention import attention_shape
from loraplex.models.config import DecoderConfig, module_shapes
from loraplex.models.decoder import Decoder
from loraplex.models.parameters import DecoderParameters, allocate_parameters
from loraplex.models.registry import read_config
from loraplex.models.rope import RotaryTable


def load_runner(folder: Path, settings: RunnerSettings, host_adapters: HostAdapters) -> ModelRunner:
    """Read the model in `folder`. Raises ConfigError, UnsupportedModelError.

    The adapters that plans copy to the device are taken from `host_adapters`.
    """
    return ModelRunner(load_parts(folder, settings, host_adapters))


def load_parts(folder: Path, settings: RunnerSettings, host_adapters: HostAdapters) -> RunnerParts:
    """As load_runner, before the parts are put together."""
    config = read_config(folder)
    device, dtype = choose_device(settings), choose_dtype(settings, config)
    shape = attention_shape(config, settings.block_size)
    kv_size = size_kv(settings, config, shape, dtype)
    pool_size = size_adapter_pool(settings, config, dtype)
    parameters = allocate_parameters(config, dtype, device)
    load_parameters(folder, parameters, config)
    kernels = select_kernels(device)
    rotary = RotaryTable(config, kv_size.max_model_len, device)
    kv_cache = KVCache(kv_size.num_blocks, config.num_layers, shape, dtype, kernels)
    return RunnerParts(
        decoder=Decoder(config, parameters, rotary, kernels, block_size=settings.block_size),
        kv_cache=kv_cache,
        adapter_bank=_adapter_bank(config, pool_size, dtype, device),
        host_adapters=host_adapters,
        sampler=Sampler(config.vocab_size, device=device),
        capacity=_capacity(settings, config, kv_size, pool_size, kv_cache, parameters),
        device=device,
    )


def _adapter_bank(
    config: DecoderConfig, size: AdapterPoolSize, dtype: torch.dtype, device: torch.device
) -> AdapterBank:
    return AdapterBank(
        size.geometry,
        size.num_pages,
        dtype=dtype,
        device=device,
        num_layers=config.num_layers,
        modules=module_shapes(config),
    )


def _capacity(
    settings: RunnerSettings,
    config: DecoderConfig,
    kv_size: KVSize,
    pool_size: AdapterPoolSize,
    kv_cache: KVCache,
    parameters: DecoderParameters,
) -> Capacity:
    return Capacity(
        block_size=settings.block_size,
        num_blocks=kv_size.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=kv_size.max_model_len,
        vocab_size=config.vocab_size,
        page_geometry=pool_size.geometry,
        num_adapter_pages=pool_size.num_pages,
        adapter_page_bytes=pool_size.page_bytes,
        keeps_host_copy=choose_device(settings).type != "cpu",
        kv_cache_bytes=kv_cache.num_bytes,
        weights_bytes=parameters.num_bytes,
    )
