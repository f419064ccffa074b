"""How much fits: from settings and model sizes to numbers of blocks and adapter pages."""

import dataclasses

import msgspec
import torch

from loraplex.core.adapter import LM_HEAD, LoraTarget
from loraplex.core.byte_sizes import enough_bytes, readable_bytes
from loraplex.core.cache import States
from loraplex.core.errors import ConfigError
from loraplex.core.plan import AdapterShare, PageGeometry, targets_by_stage
from loraplex.core.rank_limits import RankLimits
from loraplex.execution.adapters.entry_tables import head_modules
from loraplex.execution.sizing.kv import KVSize, block_bytes, size_kv
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.shortage import MemoryAdvice
from loraplex.execution.sizing.step_memory import StepMemory
from loraplex.kernels.lora import CELL_BYTES, DEVICE_CELL_BYTES, ModuleShapes
from loraplex.memory.adapter_pages import (
    layer_targets,
    page_geometry,
    pages_at_ranks,
    pages_for_bytes,
)
from loraplex.models.sharding import adapter_share
from loraplex.models.spec import ModelSpec

_LEAST_ADAPTER_BYTES = 256 << 20
_DEFAULT_ADAPTERS = 256
"""Adapters of the usual rank for which there is a place by default, where the host has memory."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KV_DTYPES = {**_DTYPES, "int8": torch.int8}


_NO_STEPS = StepMemory()


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterPoolSize:
    geometry: PageGeometry
    num_pages: int
    page_bytes: int
    entry_bytes: int
    """Bytes of a page's entry in the tables of the bank."""

    @property
    def table_bytes(self) -> int:
        return self.num_pages * self.entry_bytes

    @property
    def num_bytes(self) -> int:
        """Size of pages and tables."""
        return self.num_pages * self.page_bytes + self.table_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class MemorySize:
    kv: KVSize
    adapters: AdapterPoolSize


def choose_dtype(settings: RunnerSettings, spec: ModelSpec) -> torch.dtype:
    """Return the model's type; float32 for a checkpoint that does not name one.

    Raises ConfigError for float16 where the model's sums exceed its range.
    """
    name = spec.dtype or "float32" if settings.dtype == "auto" else settings.dtype
    if name == "float16" and spec.exceeds_float16:
        raise ConfigError(
            f"dtype float16 is not supported in {spec.architecture}, whose sums exceed its range: "
            "use bfloat16 or float32",
            param="dtype",
        )
    return _DTYPES[name]


def choose_kv_dtype(settings: RunnerSettings, dtype: torch.dtype) -> torch.dtype:
    """dtype: the model's."""
    return dtype if settings.kv_dtype == "auto" else _KV_DTYPES[settings.kv_dtype]


def choose_device(settings: RunnerSettings) -> torch.device:
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device", param="device")
    return device


def size_memory(
    settings: RunnerSettings,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    weights_bytes: int,
    free_bytes: int | None = None,
    steps: StepMemory = _NO_STEPS,
) -> MemorySize:
    """Divide the device's memory.

    free_bytes: what the device has left after the weights; None: unknown, as on a CPU. If neither
    this nor memory_bytes is known, the KV cache holds max_num_seqs sequences of
    max_model_len, at most 2 GiB, and the adapters have 256 MiB or more: up to half of what the
    host's memory leaves, for 256 adapters of the usual rank. Otherwise the KV cache takes its
    fraction of what weights and steps leave, and the adapters theirs of what the KV cache leaves of
    that (on a CPU: of memory_bytes). Bytes that were said win; max_tokens_in_paged_kv_cache wins
    where it is less. Raises ConfigError if it does not fit.

    spec: as `windowed` gives it.
    """
    advice = MemoryAdvice(settings, spec, dtype)
    left = _left(settings, weights_bytes, free_bytes, steps, advice)
    if left is None:
        kv = size_kv(settings, spec, kv_dtype)
        spare = (settings.host_bytes or 0) - weights_bytes - kv.num_bytes
        return MemorySize(kv, size_adapter_pool(settings, spec, dtype, spare_bytes=spare))
    least = smallest_pool(settings, spec, dtype)
    block = block_bytes(spec, settings.block_size, kv_dtype)
    missing = least.num_bytes + block - left
    if free_bytes is not None and missing > 0:
        raise advice.too_small(missing, steps)
    if settings.kv_cache_bytes is None and settings.num_blocks is None:
        pool_bytes = least.num_bytes
        if settings.lora_device_bytes is not None:
            pool_bytes = size_adapter_pool(settings, spec, dtype).num_bytes
        available = left - pool_bytes
        if settings.lora_device_bytes is not None and available < block:
            raise _too_much(settings, weights_bytes, block, pool_bytes, left)
        share = min(int(settings.kv_cache_fraction * left), available)
        settings = msgspec.structs.replace(settings, kv_cache_bytes=max(share, 1))
    kv = size_kv(settings, spec, kv_dtype)
    if settings.lora_device_bytes is None:
        whole = settings.memory_bytes if free_bytes is None else left - kv.num_bytes
        assert whole is not None
        share = min(int(settings.lora_device_fraction * whole), left - kv.num_bytes)
        num_pages = max(share // (least.page_bytes + least.entry_bytes), least.num_pages)
        device_bytes = num_pages * least.page_bytes
        settings = msgspec.structs.replace(settings, lora_device_bytes=device_bytes)
    pool = size_adapter_pool(settings, spec, dtype)
    if kv.num_bytes + pool.num_bytes > left:
        raise _too_much(settings, weights_bytes, kv.num_bytes, pool.num_bytes, left)
    return MemorySize(kv, pool)


def _too_much(
    settings: RunnerSettings, weights_bytes: int, kv_bytes: int, pool_bytes: int, left: int
) -> ConfigError:
    """left: what weights and steps leave."""
    together = weights_bytes + kv_bytes + pool_bytes
    missing = kv_bytes + pool_bytes - left
    said = "kv_cache_bytes" if settings.kv_cache_bytes is not None else "lora_device_bytes"
    return ConfigError(
        f"weights take {readable_bytes(weights_bytes)}, the KV cache {readable_bytes(kv_bytes)} "
        f"and the adapters' pool {readable_bytes(pool_bytes)}: {readable_bytes(together)} "
        f"together, and the device has {readable_bytes(weights_bytes + left)} for them: "
        f"lower {said} by {enough_bytes(missing)}{_or_more_memory(settings, missing)}",
        param=said if settings.memory_bytes is None else "memory_bytes",
    )


def _or_more_memory(settings: RunnerSettings, missing: int) -> str:
    if settings.memory_bytes is None:
        return ""
    return f", or raise --memory to {enough_bytes(settings.memory_bytes + missing)}"


def free_bytes(device: torch.device) -> int | None:
    """What the device has left; None: it is the host's memory, which is everybody's."""
    if device.type == "cpu":
        return None
    free, _total = torch.cuda.mem_get_info(device)
    return int(free)


def describe_memory(
    weights_bytes: int,
    size: MemorySize,
    settings: RunnerSettings,
    spec: ModelSpec,
    steps: StepMemory = _NO_STEPS,
) -> str:
    """Return one line for the log."""
    pool, limits = size.adapters, settings.rank_limits
    usual = min(settings.optimal_lora_rank, limits.largest)
    holds = (
        f"{pool.num_pages // _pages_at_ranks(spec, limits.at_most(rank), pool.geometry)} "
        f"adapters of rank {rank}"
        for rank in sorted({usual, limits.largest})
    )
    return (
        f"memory: weights {readable_bytes(weights_bytes)}; {_of_steps(steps)}"
        f"KV cache {readable_bytes(size.kv.num_bytes)}, {_tokens(size.kv, settings)}; "
        f"adapters {readable_bytes(pool.num_bytes)}, with tables of "
        f"{readable_bytes(pool.table_bytes)}, {pool.num_pages} pages of "
        f"{readable_bytes(pool.page_bytes)}: {' or '.join(holds)} on all modules"
    )


def _of_steps(steps: StepMemory) -> str:
    if steps == _NO_STEPS:
        return ""
    workspace, graphs = readable_bytes(steps.workspace), readable_bytes(steps.graphs)
    return f"steps {workspace}; recorded steps {graphs}; "


def _tokens(kv: KVSize, settings: RunnerSettings) -> str:
    """Return the number of tokens that the KV cache holds, by group if there are several."""
    texts = []
    for group, capacity in zip(kv.groups, kv.capacities, strict=True):
        size, unit = settings.block_size, "tokens"
        if isinstance(group.spec, States):
            size, unit = 1, f"states of {readable_bytes(capacity.block_bytes)}"
        text = f"{capacity.num_blocks * size} {unit}"
        if capacity.num_host_blocks:
            text += f" and {capacity.num_host_blocks * size} more on the host"
        if len(kv.groups) > 1:
            text += f" in {len(group.layers)} layers with {group.spec.name}"
        texts.append(text)
    return ", ".join(texts)


def _left(
    settings: RunnerSettings,
    weights_bytes: int,
    free_bytes: int | None,
    steps: StepMemory,
    advice: MemoryAdvice,
) -> int | None:
    """Return the bytes that weights and steps leave; None: unknown."""
    taken = steps.workspace + steps.graphs
    if settings.memory_bytes is None:
        return None if free_bytes is None else free_bytes - taken
    left = settings.memory_bytes - weights_bytes
    if left <= 0:
        raise advice.limit(weights_bytes, settings.memory_bytes)
    return left - taken if free_bytes is None else min(left, free_bytes) - taken


def size_adapter_pool(
    settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype, *, spare_bytes: int = 0
) -> AdapterPoolSize:
    """Raises ConfigError if one adapter of the largest ranks on all modules does not fit.

    spare_bytes: what weights and KV cache leave of the host's memory; the default is half of it at
    most. Pages take memory when the first adapter is in them.
    """
    geometry = adapter_geometry(settings, spec)
    page_bytes = geometry.page_elements * dtype.itemsize
    needed = _pages_at_ranks(spec, settings.rank_limits, geometry)
    sizes = (page_bytes, _entry_bytes(settings, spec))
    if settings.lora_device_bytes is None:
        usual = settings.rank_limits.at_most(settings.optimal_lora_rank)
        num_useful = _DEFAULT_ADAPTERS * _pages_at_ranks(spec, usual, geometry)
        num_pages = min(num_useful, spare_bytes // 2 // sum(sizes))
        least = pages_for_bytes(_LEAST_ADAPTER_BYTES, geometry, dtype.itemsize)
        return AdapterPoolSize(geometry, max(num_pages, least, needed), *sizes)
    num_pages = pages_for_bytes(settings.lora_device_bytes, geometry, dtype.itemsize)
    if num_pages < needed:
        raise ConfigError(
            f"lora_device_bytes {readable_bytes(settings.lora_device_bytes)} does not hold one "
            f"adapter of rank {settings.rank_limits} on all modules: lower max_lora_rank or "
            f"max_lora_ranks, or set at least {enough_bytes(needed * page_bytes)}",
            param="lora_device_bytes",
        )
    return AdapterPoolSize(geometry, num_pages, *sizes)


def adapter_geometry(settings: RunnerSettings, spec: ModelSpec) -> PageGeometry:
    limits = settings.rank_limits
    return page_geometry(
        _adapter_targets(spec),
        usual_ranks=limits.at_most(settings.optimal_lora_rank),
        max_ranks=limits,
        largest_target=largest_target(spec),
    )


def smallest_pool(settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype) -> AdapterPoolSize:
    """Return the size of a pool for one adapter of the largest ranks on all modules."""
    geometry = adapter_geometry(settings, spec)
    num_pages = _pages_at_ranks(spec, settings.rank_limits, geometry)
    page_bytes = geometry.page_elements * dtype.itemsize
    return AdapterPoolSize(geometry, num_pages, page_bytes, _entry_bytes(settings, spec))


def _entry_bytes(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Return the bytes of an adapter in the tables of layers and lm_head, of which each page has
    one: that many adapters of one page may be there."""
    head = head_of(spec)
    num_cells = sum(
        layer.num_experts.get(module, 1)
        for layer in spec.adapted_layers
        for module in layer.module_shapes
    )
    on_host = torch.device(settings.device).type == "cpu"
    return (num_cells + len(head)) * (CELL_BYTES if on_host else DEVICE_CELL_BYTES)


def head_of(spec: ModelSpec) -> ModuleShapes:
    """Return lm_head in the blocks that staging cuts it into: by the whole model's layers."""
    return head_modules(spec.whole.module_shapes, spec.hidden_size, spec.vocab_size)


def rank_share(settings: RunnerSettings, spec: ModelSpec) -> AdapterShare | None:
    """Return what of an adapter's layers, in all stages, a rank with this spec holds; None: all."""
    return adapter_share(spec.all_layers, settings.rank_limits.of(LM_HEAD) * largest_target(spec))


def largest_target(spec: ModelSpec) -> int:
    """Return the inputs and outputs of the whole model's largest linear layer."""
    return max(sum(shape) for layer in spec.whole.module_shapes for shape in layer.values())


def _pages_at_ranks(spec: ModelSpec, ranks: RankLimits, geometry: PageGeometry) -> int:
    """Return the pages of an adapter of these ranks on all modules, in the stage that has most."""
    stages = targets_by_stage(_adapter_targets(spec), spec.first_layers)
    return max(pages_at_ranks(targets, ranks, geometry) for targets in stages)


def _adapter_targets(spec: ModelSpec) -> list[LoraTarget]:
    """Return what adapters may target: in every pipeline stage pages have the same size."""
    spec = spec.all_layers
    return layer_targets(spec.module_shapes, num_experts=spec.num_experts)
