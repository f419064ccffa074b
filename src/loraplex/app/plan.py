"""Memory plan of a model and its adapters, without a server and without loading weights.

It uses config.json, the adapters' own files and the arithmetic of a start. A start measures the
memory of a GPU's steps; the plan estimates it.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from loraplex.adapters.base_check import BaseCheck, check_base_name, check_shapes
from loraplex.adapters.base_copies import without_base_copies
from loraplex.adapters.formats.inputs import open_input, read_fitting_rows
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.targets import source_of
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.app.builder import served_shapes
from loraplex.app.model_settings import with_device, within_build
from loraplex.app.open_step_sizes import (
    bytes_left,
    largest_rank,
    runner_settings,
    weights_bytes,
    with_step_sizes,
)
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, InvalidAdapterError, LoraplexError
from loraplex.core.host_memory import host_memory
from loraplex.core.plan import Capacity
from loraplex.core.stats import EngineStats
from loraplex.execution.sizing.capacity import (
    choose_dtype,
    choose_kv_dtype,
    rank_share,
    size_memory,
)
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.step_memory import StepMemory, estimated_step_memory
from loraplex.execution.weights.hub import resolve_model
from loraplex.execution.weights.stored_head import read_model
from loraplex.memory.adapter_pages import layer_targets, most_pages
from loraplex.models.spec import ModelSpec
from loraplex.serving.adapters.folders import FolderScan, find_below
from loraplex.serving.adapters.loading import trained_name
from loraplex.serving.expert_use import ExpertUse, expert_use
from loraplex.serving.model_memory import ModelMemory, memory_of
from loraplex.serving.served_model import check_fits_tiers


class PlannedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str
    rank: int = 0
    """Largest of its ranks."""
    experts: dict[str, ExpertUse] = {}
    """Changed experts by module, of modules that have experts."""
    host_bytes: int = 0
    device_pages: int = 0
    device_bytes: int = 0
    problem: str = ""
    """Reason why it cannot be served; then the numbers are 0."""


class AdapterPlan(msgspec.Struct, frozen=True, kw_only=True):
    adapters: tuple[PlannedAdapter, ...]
    fit_device: int
    """Number of adapters that fit on the device at once, whichever they are."""
    fit_host: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    device: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    memory: ModelMemory
    adapters: AdapterPlan


def plan_memory(model: ModelConfig, adapters: Sequence[str]) -> MemoryPlan:
    """Return the memory plan of a model and adapters: of the rank that holds most, of several.

    adapters: paths of adapters, or of folders with adapters at any depth. Raises ConfigError if
    the model cannot be served with these settings, or a folder does not exist.
    """
    folder = resolve_model(model.path, model.revision)
    model = within_build(str(folder), with_device(str(folder), model), folder)
    model = with_step_sizes(msgspec.structs.replace(model, path=str(folder)))
    settings = runner_settings(model)
    config = windowed(settings, read_model(folder))
    if torch.device(settings.device).type == "cpu":
        num_ranks = model.tensor_parallel_size * model.pipeline_parallel_size
        settings = settings.share_of_host(num_ranks, host_memory())
    capacity = _capacity(settings, largest_rank(settings, config))
    memory = memory_of(
        capacity,
        EngineStats(),
        targets=layer_targets(config.module_shapes, num_experts=config.num_experts),
        model=model,
    )
    planned = tuple(
        one if isinstance(one, PlannedAdapter) else _planned(*one, model, config, capacity)
        for path in adapters
        for one in _found(path)
    )
    served = [adapter for adapter in planned if not adapter.problem]
    plan = AdapterPlan(
        adapters=planned,
        fit_device=any_fit([one.device_pages for one in served], capacity.num_adapter_pages),
        fit_host=any_fit([one.host_bytes for one in served], model.lora_host_bytes),
    )
    return MemoryPlan(
        model=str(folder),
        device=settings.device,
        dtype=str(choose_dtype(settings, config)).removeprefix("torch."),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        memory=memory,
        adapters=plan,
    )


def _capacity(settings: RunnerSettings, config: ModelSpec) -> Capacity:
    dtype = choose_dtype(settings, config)
    kv_dtype = choose_kv_dtype(settings, dtype)
    rank_weights = weights_bytes(settings, config)
    is_cpu = torch.device(settings.device).type == "cpu"
    steps = StepMemory() if is_cpu else estimated_step_memory(settings, config, dtype)
    size = size_memory(
        settings,
        config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights_bytes=rank_weights,
        free_bytes=bytes_left(settings, rank_weights),
        steps=steps,
    )
    return Capacity(
        block_size=settings.block_size,
        cache_groups=size.kv.capacities,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=size.kv.max_model_len,
        vocab_size=config.vocab_size,
        page_geometry=size.adapters.geometry,
        num_adapter_pages=size.adapters.num_pages,
        adapter_page_bytes=size.adapters.page_bytes,
        adapter_table_bytes=size.adapters.table_bytes,
        adapter_share=rank_share(settings, config),
        first_layers=config.first_layers,
        host_page_bytes=0 if is_cpu else size.adapters.page_bytes,
        keeps_host_copy=not is_cpu,
        kv_cache_bytes=size.kv.num_bytes,
        weights_bytes=rank_weights,
        workspace_bytes=steps.workspace,
        graph_bytes=steps.graphs,
    )


def _found(path: str) -> list[tuple[str, str] | PlannedAdapter]:
    """Return (name, path) of an adapter, or of those below a folder, and what is left out there.

    Links are followed wherever they lead, as by a server whose clients may load any adapter.
    Raises ConfigError.
    """
    try:
        open_input(path, StagingLimits())
    except InvalidAdapterError:
        if Path(path).expanduser().is_dir():
            scan = FolderScan(SourcePolicy())
            found = [(name, str(place)) for name, place in find_below(Path(path), scan)]
            left_out = [
                PlannedAdapter(name=one.path, path=one.path, problem=f"left out: {one.reason}")
                for one in scan.left_out
            ]
            if not found and not left_out:
                raise ConfigError(f"no adapter is below {path}") from None
            return [*found, *left_out]
    except LoraplexError:
        pass  # an adapter with a mistake: its own entry reports it
    return [(Path(path).name, path)]


def _planned(
    name: str, path: str, model: ModelConfig, config: ModelSpec, capacity: Capacity
) -> PlannedAdapter:
    shapes = served_shapes(config, model)
    limits = StagingLimits(max_ranks=model.rank_limits)
    try:
        opened = open_input(path, limits)
        rows = read_fitting_rows(opened, shapes, limits)
        rows, _ = without_base_copies(rows, Path(model.path), shapes)
        check_shapes(rows, shapes, limits.max_ranks)
        check_base_name(
            *(opened.trained_on, trained_name(model.path), BaseCheck(model.adapter_base_check)),
            shapes.stored_format,
            shapes.architecture,
        )
        source = source_of("", Path(path), rows, shapes, limits.max_ranks)
        check_fits_tiers(source, model, capacity)
    except LoraplexError as error:
        return PlannedAdapter(name=name, path=path, problem=error.message)
    pages = most_pages(capacity.held(source.targets), capacity.page_geometry)
    return PlannedAdapter(
        name=name,
        path=path,
        rank=max((largest for _, largest in source.ranks.values()), default=0),
        experts=expert_use(source.targets),
        host_bytes=pages * capacity.host_page_bytes or source.num_bytes,
        device_pages=pages,
        device_bytes=pages * capacity.adapter_page_bytes,
    )


def any_fit(sizes: Sequence[int], num_bytes: int) -> int:
    """Return how many fit, whichever they are: the largest ones are counted first."""
    ends = itertools.accumulate(sorted(sizes, reverse=True))
    return sum(1 for _ in itertools.takewhile(lambda end: end <= num_bytes, ends))
