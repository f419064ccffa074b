"""Families of what engines do, of where memory lies, and of shared adapter declarations."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Final

from prometheus_client.core import Metric

from loraplex.core.errors import NotReadyError
from loraplex.core.stats import LOAD_SECONDS_BOUNDS, Durations
from loraplex.frontends.metric_families import (
    Family,
    FunctionCollector,
    collected,
    counter,
    histogram,
)
from loraplex.serving.adapters.declared_adapters import DeclarationStatus
from loraplex.serving.backend import Backend, Model
from loraplex.serving.model_memory import ModelMemory

_BOUNDS = (*(str(bound) for bound in LOAD_SECONDS_BOUNDS), "+Inf")

_OF_STATS: Final = (
    Family("loraplex_running_requests", "Sequences that hold a slot of the engine.", "num_running"),
    Family(
        "loraplex_waiting_requests",
        "Sequences that wait for a slot, KV blocks or an adapter.",
        "num_waiting",
    ),
    Family(
        "loraplex_kv_blocks",
        "KV cache blocks: held by sequences, cached for reuse, or free.",
        {"held": "blocks_held", "cached": "blocks_cached", "free": "blocks_free"},
        ("state",),
    ),
    Family(
        "loraplex_kv_cache_usage_ratio",
        "Share of the KV cache blocks that sequences hold, 0 to 1.",
        "kv_usage",
    ),
    Family(
        "loraplex_kv_host_blocks",
        "Blocks of host memory that hold the KV of preempted sequences.",
        "blocks_on_host",
    ),
    Family(
        "loraplex_adapter_device_pages",
        "Pages of the device tier of the adapter cache.",
        {
            "used": "adapters.device_pages_used",
            "free": lambda s: s.adapters.device_pages_total - s.adapters.device_pages_used,
        },
        ("state",),
    ),
    Family(
        "loraplex_adapter_host_bytes",
        "Bytes of the host tier of the adapter cache.",
        {
            "used": "adapters.host_bytes_used",
            "free": lambda s: s.adapters.host_bytes_total - s.adapters.host_bytes_used,
        },
        ("state",),
    ),
    Family(
        "loraplex_adapters_resident",
        "Adapters in each tier of the adapter cache.",
        {"device": "adapters.num_on_device", "host": "adapters.num_on_host"},
        ("tier",),
    ),
    Family(
        "loraplex_adapters_held",
        "Adapters that stay on the device: pinned ones.",
        "adapters.num_held",
    ),
    counter("loraplex_engine_steps", "Steps that the engine launched.", "steps"),
    counter(
        "loraplex_engine_step_seconds",
        "Time of the steps that ended, from planning to the result; steps in flight overlap.",
        lambda stats: stats.step_ns / 1e9,
    ),
    counter(
        "loraplex_preemptions", "Sequences that lost their KV blocks to others.", "preemptions"
    ),
    counter(
        "loraplex_prefix_cache_query_tokens",
        "Prompt tokens that were looked up in the prefix cache.",
        "prompt_tokens",
    ),
    counter(
        "loraplex_prefix_cache_hit_tokens",
        "Prompt tokens whose KV came from the prefix cache.",
        "cached_tokens",
    ),
    counter(
        "loraplex_engine_generation_tokens",
        "Tokens that the engine sampled, also those after a stop string.",
        "generation_tokens",
    ),
    counter(
        "loraplex_rank_wait_seconds",
        "Time that a rank of an engine with several ranks waited for the others.",
        lambda stats: {str(rank): ns / 1e9 for rank, ns in enumerate(stats.rank_wait_ns)},
        ("rank",),
    ),
    counter(
        "loraplex_draft_tokens",
        "Draft tokens, by whether the model accepted them.",
        {"accepted": "accepted_tokens", "rejected": lambda s: s.draft_tokens - s.accepted_tokens},
        ("result",),
    ),
    counter(
        "loraplex_adapter_cache_lookups",
        "Admissions by whether every adapter was on the device.",
        {"hit": "adapters.device_hits", "miss": "adapters.device_misses"},
        ("result",),
    ),
    counter(
        "loraplex_adapter_host_lookups",
        "Of the misses: by whether every adapter was on the device or the host.",
        {"hit": "adapters.host_hits", "miss": "adapters.host_misses"},
        ("result",),
    ),
    counter(
        "loraplex_adapter_copies",
        "Adapters copied from the host tier to the device.",
        "adapters.copies",
    ),
    counter("loraplex_adapter_loads", "Adapters read into the host tier.", "adapters.loads"),
    counter(
        "loraplex_adapter_load_failures",
        "Adapters that could not be read into the host tier.",
        "adapters.load_failures",
    ),
    counter(
        "loraplex_adapter_evictions",
        "Evicted adapters, by tier.",
        {"device": "adapters.device_evictions", "host": "adapters.host_evictions"},
        ("tier",),
    ),
)
"""Families of an EngineStats."""


def _of_models(backend: Backend) -> tuple[Family, ...]:
    """Return families of a Model."""
    return (
        Family(
            "loraplex_model_ready",
            "1 if the model would serve a request now.",
            lambda model: backend.model_ready(model.card.name),
        ),
        Family(
            "loraplex_adapters_registered",
            "Adapters that requests can use.",
            lambda model: len(model.adapter_names()),
        ),
        counter(
            "loraplex_engine_restarts",
            "Engines that were started again, by why the one before ended: crash (by itself), hang "
            "(no progress, see step_timeout_seconds), kill (from outside, as without memory).",
            "engine_restarts",
            ("reason",),
        ),
    )


_LOAD_SECONDS: Final = histogram(
    "loraplex_adapter_load_seconds",
    "What it takes to bring an adapter to the device, by stage; copies of one step share "
    "their time.",
    lambda model: {
        stage: (_buckets(times), times.total_ns / 1e9)
        for stage, times in sorted(model.load_times().items())
    },
    ("stage",),
)


def _of_device(path: str) -> Callable[[ModelMemory], int | None]:
    """Return a source of bytes that only a device with memory of its own has."""
    return lambda memory: None if memory.accelerator is None else attrgetter(path)(memory)


_OF_MEMORY: Final = (
    Family(
        "loraplex_memory_bytes",
        "Bytes set aside: weights, KV cache, both tiers of adapters, their tables, and steps.",
        {
            "weights": "weights_bytes",
            "kv_cache": "kv.num_bytes",
            "adapter_device": "device.num_bytes",
            "adapter_tables": "device.table_bytes",
            "adapter_host": "host.num_bytes",
            "workspace": _of_device("workspace_bytes"),
            "graphs": _of_device("graph_bytes"),
        },
        ("part",),
    ),
    Family(
        "loraplex_adapter_device_bytes",
        "Bytes of the device tier of the adapter cache.",
        {
            "used": lambda memory: memory.device.pages_used * memory.device.page_bytes,
            "free": lambda memory: (
                (memory.device.pages - memory.device.pages_used) * memory.device.page_bytes
            ),
        },
        ("state",),
    ),
    Family(
        "loraplex_accelerator_bytes",
        "Bytes of a device's own memory, as they were when the engine had started: all, free, and "
        "what is neither free nor set aside by this engine.",
        {state: _of_device(f"accelerator.{state}") for state in ("total", "free", "other")},
        ("state",),
    ),
    Family(
        "loraplex_adapters_fitting",
        "How many more adapters of a rank on all modules the device takes without an eviction.",
        lambda memory: {str(fit.rank): fit.more for fit in memory.device.fits},
        ("rank",),
    ),
)
"""Families of a ModelMemory."""

_OF_DECLARATIONS: Final = (
    Family(
        "loraplex_declared_adapters",
        "Adapters in the shared declarations: outdated (another version is served until the "
        "declared one is complete), failing (the last load failed), all.",
        {"all": "num_adapters", "outdated": "num_outdated", "failing": "num_failing"},
        ("state",),
    ),
    Family(
        "loraplex_adapter_declarations_age_seconds",
        "Time since the shared declarations were read completely.",
        "age_seconds",
    ),
)
"""Families of a DeclarationStatus."""


def engine_collector(backend: Backend) -> FunctionCollector:
    """Return a collector of every model's families; an engine has memory once it has started."""
    of_models, labels = _of_models(backend), ("model",)

    def collect() -> Iterator[Metric]:
        models = [((name,), model) for name, model in models_of(backend).items()]
        yield from collected(_OF_STATS, [(name, model.stats) for name, model in models], labels)
        yield from collected(of_models, models, labels)
        memories = [((name,), memory) for name, memory in memories_of(backend).items()]
        yield from collected(_OF_MEMORY, memories, labels)
        yield from collected((_LOAD_SECONDS,), models, labels)

    return FunctionCollector(collect)


def declaration_collector(status: Callable[[], DeclarationStatus]) -> FunctionCollector:
    """Return a collector of a server that follows declarations."""
    return FunctionCollector(lambda: collected(_OF_DECLARATIONS, [((), status())]))


def models_of(backend: Backend) -> Mapping[str, Model]:
    return {card.name: backend.model(card.name) for card in backend.models()}


def memories_of(backend: Backend, names: Iterable[str] | None = None) -> Mapping[str, ModelMemory]:
    """Return the memory of the models whose engine has started once."""
    memories = {}
    for name in models_of(backend) if names is None else names:
        with contextlib.suppress(NotReadyError):
            memories[name] = backend.model(name).memory()
    return memories


def _buckets(times: Durations) -> list[tuple[str, float]]:
    """Return (upper bound, how many were not longer) of each bucket."""
    return list(zip(_BOUNDS, itertools.accumulate(times.counts), strict=True))
