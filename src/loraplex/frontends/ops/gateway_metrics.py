"""Gauges that routers of Kubernetes gateways read of a model server, by vLLM's names.

The model server protocol of the Gateway API inference extension wants the queue, the share of the
KV cache in use, its size (`vllm:cache_config_info`), and `vllm:lora_requests_info`: a gauge whose
value is the time of the update and whose labels are `max_lora`, how many adapters the device holds;
`running_lora_adapters`, those that are on the device and ready to serve; `waiting_lora_adapters`,
those that requests wait for. Both are names joined by commas: the extension splits them there and
takes no blank away.

llm-d's router also reads where adapters are, idle ones too: `vllm:lora_adapter_loaded`, with the
level `gpu` (ready to serve) or `cpu` (only in host memory), and the numbers of loaded adapters.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.core.adapter import Residency
from loraplex.core.errors import NotReadyError
from loraplex.core.stats import AdapterActivity, EngineStats
from loraplex.serving.backend import Backend
from loraplex.serving.model_memory import ModelMemory

MAX_ADAPTERS: Final = 1000
"""Adapters that a family names: a router reads all of them 20 times a second."""
_Gauge = tuple[str, str, Callable[[EngineStats], float]]

_GAUGES: tuple[_Gauge, ...] = (
    (
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        lambda stats: stats.num_running,
    ),
    (
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda stats: stats.num_waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda stats: stats.kv_usage,
    ),
    (
        "vllm:gpu_cache_usage_perc",
        "The same by its older name.",
        lambda stats: stats.kv_usage,
    ),
    (
        "vllm:num_gpu_loaded_lora_adapters",
        "Number of LoRA adapters that are ready on the device.",
        lambda stats: stats.adapters.num_on_device,
    ),
    (
        "vllm:num_cpu_loaded_lora_adapters",
        "Number of LoRA adapters in host memory.",
        lambda stats: stats.adapters.num_on_host,
    ),
)

_LEVELS: Final = {Residency.DEVICE: "gpu", Residency.COPYING: "cpu", Residency.HOST: "cpu"}


class _Adapters(NamedTuple):
    """Adapters of one model that requests can name and the engine has or awaits."""

    loaded: list[tuple[str, str, bool]]
    """(name, level, whether it is pinned); the most wanted first."""
    waiting: list[str]
    """Names of adapters that requests wait for."""
    num_on_device: int


class GatewayCollector(Collector):
    """Gauges of the models. Call `refresh` before it collects: it queries the engines."""

    def __init__(
        self,
        backend: Backend,
        has_gauges: Callable[[str], bool] | None = None,
        unix_seconds: Callable[[], float] = time.time,
        max_adapters: int = MAX_ADAPTERS,
    ) -> None:
        """has_gauges: whether a model has them; None: all do. max_adapters: maximum number of
        adapters that a family names."""
        self._backend = backend
        self._has_gauges = has_gauges
        self._unix_seconds = unix_seconds
        self._max_adapters = max_adapters
        self._activities: dict[str, AdapterActivity] = {}
        self._refreshed = 0.0

    async def refresh(self) -> None:
        """Query the engines for the states and users of their adapters."""
        self._activities = {
            name: await self._backend.model(name).adapter_activity() for name in self._names()
        }
        self._refreshed = self._unix_seconds()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not query a backend that has not started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        names = self._names()
        stats = {name: self._backend.model(name).stats for name in names}
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            for model in names:
                gauge.add_metric([model], value(stats[model]))
            yield gauge
        memories = dict(self._memories(names))
        yield _cache_config_info(memories)
        yield _max_gpu_lora_adapters(names, memories)
        adapters = {name: self._named(name, at) for name, at in self._activities.items()}
        yield self._lora_adapter_loaded(adapters)
        if names:
            yield self._lora_requests_info(adapters, memories)

    def _names(self) -> list[str]:
        names = [card.name for card in self._backend.models()]
        has_gauges = self._has_gauges
        return names if has_gauges is None else [name for name in names if has_gauges(name)]

    def _memories(self, names: Iterable[str]) -> Iterator[tuple[str, ModelMemory]]:
        for name in names:
            with contextlib.suppress(NotReadyError):
                yield name, self._backend.model(name).memory()

    def _named(self, model: str, activity: AdapterActivity) -> _Adapters:
        """Return the adapters by name: pinned ones first, then used ones, then those on the device.

        A router that sees only some of them then misses those that are soonest evicted.
        """
        place, pinned = activity.residency, set(activity.pinned)
        on_device = {digest for digest, at in place.items() if at is Residency.DEVICE}
        used = activity.running.keys() | activity.waiting.keys()
        names = self._backend.model(model).adapter_names()
        loaded = [(name, digest) for name, digest in names if place.get(digest) in _LEVELS]
        loaded.sort(
            key=lambda adapter: (
                adapter[1] not in pinned,
                adapter[1] not in used,
                adapter[1] not in on_device,
                adapter[0],
            )
        )
        wanted = activity.waiting.keys() - on_device
        return _Adapters(
            [(name, _LEVELS[place[digest]], digest in pinned) for name, digest in loaded],
            [name for name, digest in names if digest in wanted],
            len(on_device),
        )

    def _lora_adapter_loaded(self, adapters: Mapping[str, _Adapters]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for each LoRA adapter in memory, by its best level.",
            labels=["model_name", "adapter_name", "level", "pinned"],
        )
        series: dict[tuple[str, ...], None] = {}
        for model, named in adapters.items():
            # Two tenants' adapters of one name are one series.
            for name, level, is_pinned in named.loaded:
                series.setdefault((model, name, level, str(is_pinned).lower()))
        for labels in itertools.islice(series, self._max_adapters):
            family.add_metric(labels, 1)
        return family

    def _lora_requests_info(
        self, adapters: Mapping[str, _Adapters], memories: Mapping[str, ModelMemory]
    ) -> Metric:
        """One series for all models: the extension reads only the newest."""
        ready, waiting, most = [], [], 0
        for model, named in adapters.items():
            ready += [name for name, level, _ in named.loaded if level == "gpu"]
            waiting += named.waiting
            most += max(_most_on_device(memories.get(model)), named.num_on_device)
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = (_joined(some, self._max_adapters) for some in (ready, waiting))
        info.add_metric([str(most), *names], self._refreshed)
        return info


def _cache_config_info(memories: Mapping[str, ModelMemory]) -> Metric:
    """Return the size of the KV cache: routers remember as many prefixes as it holds."""
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Blocks of the KV cache, and tokens of a block.",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    for model, memory in memories.items():
        block_tokens = memory.kv.block_tokens
        # With several cache groups: the group that decides how many tokens fit.
        num_blocks = memory.kv.tokens // block_tokens
        family.add_metric([model, str(block_tokens), str(num_blocks)], 1)
    return family


def _max_gpu_lora_adapters(names: Iterable[str], memories: Mapping[str, ModelMemory]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:max_gpu_lora_adapters",
        "Maximum number of LoRA adapters of the usual rank on the device.",
        labels=["model_name"],
    )
    for name in names:
        family.add_metric([name], _most_on_device(memories.get(name)))
    return family


def _most_on_device(memory: ModelMemory | None) -> int:
    """Adapters of the usual rank."""
    return memory.device.fits[0].holds if memory is not None and memory.device.fits else 0


def _joined(names: Iterable[str], max_names: int) -> str:
    """Join the first names with commas. Names that contain a comma are left out."""
    usable = dict.fromkeys(name for name in names if "," not in name)
    return ",".join(sorted(itertools.islice(usable, max_names)))
