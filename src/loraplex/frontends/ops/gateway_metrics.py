"""Gauges that the Gateway API inference extension needs of a model server, by vLLM's names.

Its model server protocol (docs/proposals/003-model-server-protocol) wants the queue, the share of
the KV cache in use, and `vllm:lora_requests_info`: a gauge whose value is the time of the update
and whose labels are `max_lora`, how many adapters the device holds; `running_lora_adapters`, those
that are on the device and ready to serve; `waiting_lora_adapters`, those that requests wait for.
Both are names joined by commas: the extension splits them there and takes no blank away.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.core.adapter import Residency
from loraplex.core.errors import NotReadyError
from loraplex.core.principal import LOCAL
from loraplex.core.stats import AdapterActivity, EngineStats
from loraplex.serving.backend import Backend

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
)


class GatewayCollector(Collector):
    """Gauges of the models. Call `refresh` before it collects: it queries the engines."""

    def __init__(
        self,
        backend: Backend,
        has_gauges: Callable[[str], bool] | None = None,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """has_gauges: whether a model has them; None: all do."""
        self._backend = backend
        self._has_gauges = has_gauges
        self._unix_seconds = unix_seconds
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
        if names:
            yield self._lora_requests_info()

    def _names(self) -> list[str]:
        names = [card.name for card in self._backend.models()]
        has_gauges = self._has_gauges
        return names if has_gauges is None else [name for name in names if has_gauges(name)]

    def _lora_requests_info(self) -> Metric:
        """One series for all models: the extension reads only the newest."""
        ready, waiting, most = [], [], 0
        for model, activity in self._activities.items():
            on_device = {
                digest for digest, at in activity.residency.items() if at is Residency.DEVICE
            }
            cards = self._backend.adapters(LOCAL, model)
            ready += [card.name for card in cards if card.digest in on_device]
            wanted = activity.waiting.keys() - on_device
            waiting += [card.name for card in cards if card.digest in wanted]
            most += max(self._most_on_device(model), len(on_device))
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        info.add_metric([str(most), _joined(ready), _joined(waiting)], self._refreshed)
        return info

    def _most_on_device(self, model: str) -> int:
        """Adapters of the usual rank."""
        try:
            fits = self._backend.model(model).memory().device.fits
        except NotReadyError:
            return 0
        return fits[0].holds if fits else 0


def _joined(names: Iterable[str]) -> str:
    """Join names with commas. Names that contain a comma are left out."""
    return ",".join(sorted(name for name in names if "," not in name))
