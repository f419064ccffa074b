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

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import Metric

from loraplex.core.adapter import Residency
from loraplex.core.stats import AdapterActivity
from loraplex.frontends.metric_families import Family, TableCollector, collected
from loraplex.frontends.ops.engine_families import memories_of
from loraplex.serving.backend import Backend
from loraplex.serving.model_memory import ModelMemory

MAX_ADAPTERS: Final = 1000
"""Adapters that a family names: a router reads all of them 20 times a second."""

_OF_STATS: Final = (
    Family(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        "num_running",
    ),
    Family(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        "num_waiting",
    ),
    Family("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_usage"),
    Family("vllm:gpu_cache_usage_perc", "The same by its older name.", "kv_usage"),
    Family(
        "vllm:num_gpu_loaded_lora_adapters",
        "Number of LoRA adapters that are ready on the device.",
        "adapters.num_on_device",
    ),
    Family(
        "vllm:num_cpu_loaded_lora_adapters",
        "Number of LoRA adapters in host memory.",
        "adapters.num_on_host",
    ),
)
"""Families of an EngineStats."""
_CACHE_CONFIG: Final = Family(
    "vllm:cache_config_info",
    "Blocks of the KV cache, and tokens of a block.",
    # With several cache groups: the group that decides how many tokens fit.
    lambda memory: {
        (str(memory.kv.block_tokens), str(memory.kv.tokens // memory.kv.block_tokens)): 1
    },
    ("block_size", "num_gpu_blocks"),
)
"""Size of a ModelMemory's KV cache: routers remember as many prefixes as it holds."""
_MAX_ON_DEVICE: Final = Family(
    "vllm:max_gpu_lora_adapters",
    "Maximum number of LoRA adapters of the usual rank on the device.",
    lambda memory: _most_on_device(memory),
)
_LOADED: Final = Family(
    "vllm:lora_adapter_loaded",
    "1 for each LoRA adapter in memory, by its best level.",
    lambda series: dict.fromkeys(series, 1),
    ("model_name", "adapter_name", "level", "pinned"),
)
_REQUESTS: Final = Family(
    "vllm:lora_requests_info",
    "Running stats on lora requests.",
    lambda series: series,
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)

_LEVELS: Final = {Residency.DEVICE: "gpu", Residency.COPYING: "cpu", Residency.HOST: "cpu"}


class _Adapters(NamedTuple):
    """Adapters of one model that requests can name and the engine has or awaits."""

    loaded: list[tuple[str, str, bool]]
    """(name, level, whether it is pinned); the most wanted first."""
    waiting: list[str]
    """Names of adapters that requests wait for."""
    num_on_device: int


class GatewayCollector(TableCollector):
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

    def collect(self) -> Iterator[Metric]:
        names, labels = self._names(), ("model_name",)
        stats = [((name,), self._backend.model(name).stats) for name in names]
        yield from collected(_OF_STATS, stats, labels)
        memories = memories_of(self._backend, names)
        known = [((name,), memory) for name, memory in memories.items()]
        yield from collected((_CACHE_CONFIG,), known, labels)
        all_ = [((name,), memories.get(name)) for name in names]
        yield from collected((_MAX_ON_DEVICE,), all_, labels)
        adapters = {name: self._named(name, at) for name, at in self._activities.items()}
        yield from collected((_LOADED,), [((), self._series(adapters))])
        if names:
            yield from collected((_REQUESTS,), [((), self._requests_info(adapters, memories))])

    def _names(self) -> list[str]:
        names = [card.name for card in self._backend.models()]
        has_gauges = self._has_gauges
        return names if has_gauges is None else [name for name in names if has_gauges(name)]

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

    def _series(self, adapters: Mapping[str, _Adapters]) -> Iterable[tuple[str, ...]]:
        # Two tenants' adapters of one name are one series.
        series = dict.fromkeys(
            (model, name, level, str(is_pinned).lower())
            for model, named in adapters.items()
            for name, level, is_pinned in named.loaded
        )
        return itertools.islice(series, self._max_adapters)

    def _requests_info(
        self, adapters: Mapping[str, _Adapters], memories: Mapping[str, ModelMemory]
    ) -> Mapping[tuple[str, ...], float]:
        """Return one series for all models: the extension reads only the newest."""
        ready, waiting, most = [], [], 0
        for model, named in adapters.items():
            ready += [name for name, level, _ in named.loaded if level == "gpu"]
            waiting += named.waiting
            most += max(_most_on_device(memories.get(model)), named.num_on_device)
        names = (_joined(some, self._max_adapters) for some in (ready, waiting))
        return {(str(most), *names): self._refreshed}


def _most_on_device(memory: ModelMemory | None) -> int:
    """Adapters of the usual rank."""
    return memory.device.fits[0].holds if memory is not None and memory.device.fits else 0


def _joined(names: Iterable[str], max_names: int) -> str:
    """Join the first names with commas. Names that contain a comma are left out."""
    usable = dict.fromkeys(name for name in names if "," not in name)
    return ",".join(sorted(itertools.islice(usable, max_names)))
