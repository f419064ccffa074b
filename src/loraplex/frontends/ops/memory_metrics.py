"""What lies where, and how long adapters took to come there, as Prometheus families."""

import itertools
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.core.errors import NotReadyError
from loraplex.core.stats import LOAD_SECONDS_BOUNDS, Durations
from loraplex.serving.backend import Backend
from loraplex.serving.model_memory import ModelMemory

_BOUNDS = (*(str(bound) for bound in LOAD_SECONDS_BOUNDS), "+Inf")


class MemoryCollector(Collector):
    """Gauges of every model whose engine has started once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not query a backend that has not started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        memories = dict(self._memories())
        yield _memory_bytes(memories)
        yield _device_bytes(memories)
        yield _accelerator_bytes(memories)
        yield _fits(memories)
        yield self._load_seconds()

    def _memories(self) -> Iterator[tuple[str, ModelMemory]]:
        for card in self._backend.models():
            try:
                yield card.name, self._backend.model(card.name).memory()
            except NotReadyError:
                continue

    def _load_seconds(self) -> Metric:
        family = HistogramMetricFamily(
            "loraplex_adapter_load_seconds",
            "What it takes to bring an adapter to the device, by stage; copies of one step share "
            "their time.",
            labels=["model", "stage"],
        )
        for card in self._backend.models():
            for stage, times in sorted(self._backend.model(card.name).load_times().items()):
                family.add_metric([card.name, stage], _buckets(times), times.total_ns / 1e9)
        return family


def _memory_bytes(memories: dict[str, ModelMemory]) -> Metric:
    family = GaugeMetricFamily(
        "loraplex_memory_bytes",
        "Bytes set aside: weights, KV cache, both tiers of adapters, their tables, and steps.",
        labels=["model", "part"],
    )
    for model, memory in memories.items():
        family.add_metric([model, "weights"], memory.weights_bytes)
        family.add_metric([model, "kv_cache"], memory.kv.num_bytes)
        family.add_metric([model, "adapter_device"], memory.device.num_bytes)
        family.add_metric([model, "adapter_tables"], memory.device.table_bytes)
        family.add_metric([model, "adapter_host"], memory.host.num_bytes)
        if memory.accelerator is not None:
            family.add_metric([model, "workspace"], memory.workspace_bytes)
            family.add_metric([model, "graphs"], memory.graph_bytes)
    return family


def _accelerator_bytes(memories: dict[str, ModelMemory]) -> Metric:
    family = GaugeMetricFamily(
        "loraplex_accelerator_bytes",
        "Bytes of a device's own memory, as they were when the engine had started: all, free, and "
        "what is neither free nor set aside by this engine.",
        labels=["model", "state"],
    )
    for model, memory in memories.items():
        if memory.accelerator is not None:
            family.add_metric([model, "total"], memory.accelerator.total)
            family.add_metric([model, "free"], memory.accelerator.free)
            family.add_metric([model, "other"], memory.accelerator.other)
    return family


def _device_bytes(memories: dict[str, ModelMemory]) -> Metric:
    family = GaugeMetricFamily(
        "loraplex_adapter_device_bytes",
        "Bytes of the device tier of the adapter cache.",
        labels=["model", "state"],
    )
    for model, memory in memories.items():
        device = memory.device
        family.add_metric([model, "used"], device.pages_used * device.page_bytes)
        free = device.pages - device.pages_used
        family.add_metric([model, "free"], free * device.page_bytes)
    return family


def _fits(memories: dict[str, ModelMemory]) -> Metric:
    family = GaugeMetricFamily(
        "loraplex_adapters_fitting",
        "How many more adapters of a rank on all modules the device takes without an eviction.",
        labels=["model", "rank"],
    )
    for model, memory in memories.items():
        for fit in memory.device.fits:
            family.add_metric([model, str(fit.rank)], fit.more)
    return family


def _buckets(times: Durations) -> list[tuple[str, float]]:
    """(upper bound, how many were not longer)"""
    return list(zip(_BOUNDS, itertools.accumulate(times.counts), strict=True))
