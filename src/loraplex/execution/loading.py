"""Loads a model folder by the operator's settings: weights first, then what memory they leave."""

import contextlib
import dataclasses
import functools
import logging
from pathlib import Path

import msgspec
import torch

from loraplex.core.host_memory import host_memory
from loraplex.core.plan import Capacity
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.assembly import Assembly, measure_steps
from loraplex.execution.checking.start import start_verdict
from loraplex.execution.grammar.compiler import VocabularySource
from loraplex.execution.sizing.capacity import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    describe_memory,
    free_bytes,
    size_memory,
)
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.measuring import settled_memory
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.shortage import MemoryAdvice, out_of_memory_is
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.stages import StageLinks
from loraplex.execution.vector_layers import load_vector_layers
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packing import WeightFormat
from loraplex.execution.weights.size import taken_apart_bytes, weights_size
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.accelerator import Accelerator, DeviceMemory
from loraplex.kernels.channel import RankChannels
from loraplex.kernels.dispatch import select_accelerator, select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.torch_ops import TorchOps, replace_ops
from loraplex.models.linear_group import TensorShard
from loraplex.models.parameters import linear_places
from loraplex.models.sharding import WHOLE, shard
from loraplex.models.spec import ModelSpec
from loraplex.models.stages import ONLY_STAGE, stage

logger = logging.getLogger(__name__)

_MARGIN_SHARE = 128
"""Share of a GPU's memory, 1 / 128, that stays free: allocators round up."""


def load_runner(
    folder: Path,
    settings: RunnerSettings,
    host_adapters: HostAdapters,
    vocabulary: VocabularySource | None = None,
) -> ModelRunner:
    """Read the model in `folder`. Raises ConfigError, UnsupportedModelError.

    The adapters that plans copy to the device are taken from `host_adapters`. vocabulary: None: no
    output can be constrained by a grammar.
    """
    return start_runner(load_parts(folder, settings, host_adapters, vocabulary), settings)


def load_parts(
    folder: Path,
    settings: RunnerSettings,
    host_adapters: HostAdapters,
    vocabulary: VocabularySource | None = None,
    *,
    accelerator: Accelerator | None = None,
    place: TensorShard = WHOLE,
    channels: RankChannels | None = None,
    links: StageLinks | None = None,
) -> RunnerParts:
    """Load the parts of a runner; see load_runner.

    accelerator: used in place of that of settings.device. place: of this rank among those of its
    stage, which the channels connect. links: to the other stages; None: there are none.
    """
    pipeline = ONLY_STAGE if links is None else links.stage
    spec = stage(shard(windowed(settings, read_model(folder)), place), pipeline)
    device = choose_device(settings) if accelerator is None else accelerator.device
    accelerator = accelerator or select_accelerator(device)
    if device.type == "cpu":
        settings = settings.share_of_host(place.size * pipeline.size, host_memory())
    free = _free_bytes(device, accelerator)
    _check_fit(settings, spec, free)
    kernels = _checked_kernels(folder, settings, spec, accelerator, place, channels)
    dtype = choose_dtype(settings, spec)
    form = WeightFormat(dtype=dtype, precision=settings.precision, device=device)
    advice = MemoryAdvice(settings, spec, dtype)
    with out_of_memory_is(lambda: advice.weights(free)):
        weights = load_weights(folder, spec, kernels, form, _weights_cache(settings))
        vector_layers = load_vector_layers(folder, spec, device)
    with contextlib.ExitStack() as undo:
        if weights.storing is not None:
            undo.callback(weights.storing.close)
        assembly = Assembly(
            spec=spec,
            parameters=weights.parameters,
            weights_bytes=weights.num_bytes
            + sum(each.num_bytes for each in vector_layers)
            + _taken_apart(spec, dtype),
            settings=settings,
            kernels=kernels,
            accelerator=accelerator,
            channels=channels,
            links=links,
            vector_layers=vector_layers,
        )
        parts = assemble_parts(assembly, host_adapters, vocabulary)
        undo.pop_all()
    return dataclasses.replace(parts, storing=weights.storing)


def _checked_kernels(
    folder: Path,
    settings: RunnerSettings,
    spec: ModelSpec,
    accelerator: Accelerator | None,
    place: TensorShard,
    channels: RankChannels | None,
) -> Kernels:
    """Select the kernels, without those that a check has found to fail."""
    channel = None if channels is None else channels.steps
    device = torch.device(settings.device) if accelerator is None else accelerator.device
    verdict = start_verdict(folder, settings, spec, place, device)
    kernels = select_kernels(
        device,
        accelerator,
        batch_invariant=settings.batch_invariant,
        attention_backend=verdict.attention_backend if verdict else settings.attention_backend,
        channel=channel,
        sizes=verdict.tuning.sizes if verdict else {},
    )
    if verdict is not None:
        fallen = [finding.op for finding in verdict.fallen]
        replace_ops(kernels, TorchOps(device, channel), fallen)
    return kernels


def assemble_parts(
    assembly: Assembly, host_adapters: HostAdapters, vocabulary: VocabularySource | None = None
) -> RunnerParts:
    """Measure what steps take, divide the memory that the weights leave, and allocate it.

    The weights must be on the device. Raises ConfigError, which names the setting to lower.
    """
    settings, spec = assembly.settings, assembly.spec
    steps = measure_steps(assembly)
    free = _spendable(assembly)
    if free is not None:
        # Of a decoder that is yet to be built.
        free -= _taken_apart(spec, assembly.dtype)
    size = size_memory(
        settings,
        spec,
        dtype=assembly.dtype,
        kv_dtype=assembly.kv_dtype,
        weights_bytes=assembly.weights_bytes,
        free_bytes=free,
        steps=steps,
    )
    logger.info("%s", describe_memory(assembly.weights_bytes, size, settings, spec, steps))
    pool_bytes = size.adapters.num_pages * size.adapters.page_bytes
    with out_of_memory_is(lambda: assembly.advice.pools(free, size.kv.num_bytes, pool_bytes)):
        return assembly.parts(size, host_adapters, vocabulary, steps)


def _taken_apart(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of weights that mixers keep a second time."""
    return sum(taken_apart_bytes(place, dtype) for place in linear_places(spec))


def start_runner(parts: RunnerParts, settings: RunnerSettings) -> ModelRunner:
    """Make a runner, and record its steps. Raises ConfigError if they do not fit."""
    runner, accelerator = ModelRunner(parts), parts.accelerator
    if accelerator is None:
        return runner
    spec = parts.decoder.spec
    advice = MemoryAdvice(settings, spec, choose_dtype(settings, spec))
    before = settled_memory(accelerator)
    available = None if before is None else before.free
    with out_of_memory_is(lambda: advice.graphs(available)):
        runner.record_steps()
    after = settled_memory(accelerator)
    if before is not None and after is not None:
        capacity = _as_measured(runner.capacity(), before, after)
        if after.free < capacity.workspace_bytes:
            raise advice.graphs(available)
        runner.set_capacity(capacity)
    return runner


def _as_measured(capacity: Capacity, before: DeviceMemory, after: DeviceMemory) -> Capacity:
    """Return the capacity with measured bytes. before, after: the steps were recorded."""
    return msgspec.structs.replace(
        capacity,
        graph_bytes=max(before.free - after.free, 0),
        device_bytes=after.total,
        device_free_bytes=max(after.free - capacity.workspace_bytes, 0),
    )


def _check_fit(settings: RunnerSettings, spec: ModelSpec, free: int | None) -> None:
    """Raise ConfigError for a model that cannot fit, before the work. Steps are not measured yet.

    free: bytes of a device with a memory of its own.
    """
    dtype = choose_dtype(settings, spec)
    sizes = functools.partial(
        size_memory, settings, spec, dtype=dtype, kv_dtype=choose_kv_dtype(settings, dtype)
    )
    expected = weights_size(spec, dtype, settings.precision)
    if free is None:
        sizes(weights_bytes=expected)
        return
    if free <= expected:
        raise MemoryAdvice(settings, spec, dtype).weights(free)
    sizes(weights_bytes=expected, free_bytes=free - expected)


def _spendable(assembly: Assembly) -> int | None:
    """Return the bytes that the weights leave; None: unknown, as on a CPU."""
    free = _free_bytes(assembly.device, assembly.accelerator)
    memory = None if assembly.accelerator is None else assembly.accelerator.memory()
    return free if free is None or memory is None else free - memory.total // _MARGIN_SHARE


def _free_bytes(device: torch.device, accelerator: Accelerator | None) -> int | None:
    """Return the free bytes; None: the device's memory is the host's."""
    if accelerator is None:
        return free_bytes(device)
    memory = settled_memory(accelerator)
    return None if memory is None else memory.free


def _weights_cache(settings: RunnerSettings) -> PackedCache | None:
    folder = settings.weights_cache
    return None if folder is None else PackedCache.usable(folder, settings.weights_cache_bytes)
