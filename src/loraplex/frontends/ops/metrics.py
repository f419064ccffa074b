"""GET /metrics: what requests did and what engines do, as Prometheus text.

Engines' numbers are read from `Backend.stats`; the text of one scrape serves those right after it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from loraplex.core.server_config import ServerConfig
from loraplex.core.stats import EngineStats
from loraplex.frontends.openapi.operation import TEXT, Described, Media, Operation, ResponseDoc
from loraplex.frontends.ops.frontend_numbers import FrontendNumbers
from loraplex.frontends.ops.gateway_metrics import MAX_ADAPTERS, GatewayCollector
from loraplex.frontends.ops.memory_metrics import MemoryCollector
from loraplex.frontends.ops.responses import guard_responses
from loraplex.frontends.prometheus_text import as_originals_write
from loraplex.serving.backend import Backend
from loraplex.serving.request_metrics import RequestMetrics

_Family = tuple[str, str, str | None, Callable[[EngineStats], dict[str, float]]]
"""(name, help, label besides `model`, values by that label's value); without label, by ""."""

_GAUGES: tuple[_Family, ...] = (
    (
        "running_requests",
        "Sequences that hold a slot of the engine.",
        None,
        lambda stats: {"": stats.num_running},
    ),
    (
        "waiting_requests",
        "Sequences that wait for a slot, KV blocks or an adapter.",
        None,
        lambda stats: {"": stats.num_waiting},
    ),
    (
        "kv_blocks",
        "KV cache blocks: held by sequences, cached for reuse, or free.",
        "state",
        lambda stats: {
            "held": stats.blocks_held,
            "cached": stats.blocks_cached,
            "free": stats.blocks_free,
        },
    ),
    (
        "kv_cache_usage_ratio",
        "Share of the KV cache blocks that sequences hold, 0 to 1.",
        None,
        lambda stats: {"": stats.kv_usage},
    ),
    (
        "kv_host_blocks",
        "Blocks of host memory that hold the KV of preempted sequences.",
        None,
        lambda stats: {"": stats.blocks_on_host},
    ),
    (
        "adapter_device_pages",
        "Pages of the device tier of the adapter cache.",
        "state",
        lambda stats: {
            "used": stats.adapters.device_pages_used,
            "free": stats.adapters.device_pages_total - stats.adapters.device_pages_used,
        },
    ),
    (
        "adapter_host_bytes",
        "Bytes of the host tier of the adapter cache.",
        "state",
        lambda stats: {
            "used": stats.adapters.host_bytes_used,
            "free": stats.adapters.host_bytes_total - stats.adapters.host_bytes_used,
        },
    ),
    (
        "adapters_resident",
        "Adapters in each tier of the adapter cache.",
        "tier",
        lambda stats: {
            "device": stats.adapters.num_on_device,
            "host": stats.adapters.num_on_host,
        },
    ),
    (
        "adapters_held",
        "Adapters that stay on the device: pinned ones.",
        None,
        lambda stats: {"": stats.adapters.num_held},
    ),
)

_COUNTERS: tuple[_Family, ...] = (
    ("engine_steps", "Steps that the engine launched.", None, lambda stats: {"": stats.steps}),
    (
        "engine_step_seconds",
        "Time of the steps that ended, from planning to the result; steps in flight overlap.",
        None,
        lambda stats: {"": stats.step_ns / 1e9},
    ),
    (
        "preemptions",
        "Sequences that lost their KV blocks to others.",
        None,
        lambda stats: {"": stats.preemptions},
    ),
    (
        "prefix_cache_query_tokens",
        "Prompt tokens that were looked up in the prefix cache.",
        None,
        lambda stats: {"": stats.prompt_tokens},
    ),
    (
        "prefix_cache_hit_tokens",
        "Prompt tokens whose KV came from the prefix cache.",
        None,
        lambda stats: {"": stats.cached_tokens},
    ),
    (
        "engine_generation_tokens",
        "Tokens that the engine sampled, also those after a stop string.",
        None,
        lambda stats: {"": stats.generation_tokens},
    ),
    (
        "rank_wait_seconds",
        "Time that a rank of an engine with several ranks waited for the others.",
        "rank",
        lambda stats: {str(rank): ns / 1e9 for rank, ns in enumerate(stats.rank_wait_ns)},
    ),
    (
        "draft_tokens",
        "Draft tokens, by whether the model accepted them.",
        "result",
        lambda stats: {
            "accepted": stats.accepted_tokens,
            "rejected": stats.draft_tokens - stats.accepted_tokens,
        },
    ),
    (
        "adapter_cache_lookups",
        "Admissions by whether every adapter was on the device.",
        "result",
        lambda stats: {"hit": stats.adapters.device_hits, "miss": stats.adapters.device_misses},
    ),
    (
        "adapter_host_lookups",
        "Of the misses: by whether every adapter was on the device or the host.",
        "result",
        lambda stats: {"hit": stats.adapters.host_hits, "miss": stats.adapters.host_misses},
    ),
    (
        "adapter_copies",
        "Adapters copied from the host tier to the device.",
        None,
        lambda stats: {"": stats.adapters.copies},
    ),
    (
        "adapter_loads",
        "Adapters read into the host tier.",
        None,
        lambda stats: {"": stats.adapters.loads},
    ),
    (
        "adapter_load_failures",
        "Adapters that could not be read into the host tier.",
        None,
        lambda stats: {"": stats.adapters.load_failures},
    ),
    (
        "adapter_evictions",
        "Evicted adapters, by tier.",
        "tier",
        lambda stats: {
            "device": stats.adapters.device_evictions,
            "host": stats.adapters.host_evictions,
        },
    ),
)


_MAX_SHARE = 0.1
"""Share of the event loop's time that scrapes may take: texts with many adapters are kept longer.
"""


class MetricsLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of what scrapes cost."""

    cache_seconds: float = 0.0
    """Minimum age of a text before another is made; 0: each scrape makes its own."""
    max_adapters: int = MAX_ADAPTERS
    """Maximum number of adapters that one of the gateways' families names."""

    @classmethod
    def of(cls, settings: ServerConfig) -> "MetricsLimits":
        return cls(
            cache_seconds=settings.metrics_cache_seconds,
            max_adapters=settings.max_reported_adapters,
        )


_NO_CACHE: Final = MetricsLimits()


def metrics_app(
    backend: Backend,
    request_metrics: RequestMetrics,
    collectors: Iterable[Collector] = (),
    has_gauges: Callable[[str], bool] | None = None,
    limits: MetricsLimits = _NO_CACHE,
    others: FrontendNumbers | None = None,
) -> ASGIApp:
    """An app with one route, GET /metrics; for a port of its own or to be mounted.

    collectors: of other front ends. has_gauges: whether a base model has vLLM's gauges; None: all.
    others: what other processes count of the requests.
    """
    return Starlette(
        routes=metrics_routes(backend, request_metrics, collectors, has_gauges, limits, others)
    )


def metrics_routes(
    backend: Backend,
    request_metrics: RequestMetrics,
    collectors: Iterable[Collector] = (),
    has_gauges: Callable[[str], bool] | None = None,
    limits: MetricsLimits = _NO_CACHE,
    others: FrontendNumbers | None = None,
    seconds: Callable[[], float] = time.monotonic,
) -> list[Route]:
    """Return the routes: OpenMetrics for clients that accept it, else Prometheus' text format."""
    gateway = GatewayCollector(backend, has_gauges, max_adapters=limits.max_adapters)
    registry = metrics_registry(backend, request_metrics, [gateway, *collectors], others)

    async def refresh() -> None:
        await gateway.refresh()
        if others is not None:
            await others.refresh()

    texts = _Texts(refresh, registry, limits.cache_seconds, seconds)

    async def metrics(request: Request) -> Response:
        text, content_type = await texts.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return [Route("/metrics", metrics, methods=["GET"])]


class _Texts:
    """The newest text of each format, for as long as it is fresh.

    Several gateways scrape every 50 ms each. Scrapes that come while a text is made wait for it.
    """

    def __init__(
        self,
        refresh: Callable[[], Awaitable[None]],
        registry: CollectorRegistry,
        cache_seconds: float,
        seconds: Callable[[], float],
    ) -> None:
        self._refresh = refresh
        self._registry = registry
        self._cache_seconds = cache_seconds
        self._seconds = seconds
        self._making = asyncio.Lock()
        self._texts: dict[str, tuple[bytes, float]] = {}
        """Text and the time until which it is fresh, by content type."""

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Return a text in the format that a client accepts, and its content type."""
        encode, content_type = choose_encoder(accept)
        if not self._cache_seconds:
            await self._refresh()
            return self._encoded(encode, content_type), content_type
        async with self._making:
            text, fresh_until = self._texts.get(content_type, (b"", 0.0))
            if not text or self._seconds() >= fresh_until:
                await self._refresh()
                begin = self._seconds()
                text = self._encoded(encode, content_type)
                end = self._seconds()
                kept = max(self._cache_seconds, (end - begin) / _MAX_SHARE)
                self._texts[content_type] = text, end + kept
        return text, content_type

    def _encoded(self, encode: Callable[[CollectorRegistry], bytes], content_type: str) -> bytes:
        text = encode(self._registry)
        return as_originals_write(text) if content_type.startswith("text/plain") else text


def metrics_registry(
    backend: Backend,
    request_metrics: RequestMetrics,
    collectors: Iterable[Collector],
    others: FrontendNumbers | None = None,
) -> CollectorRegistry:
    """All families: the engines', the requests', and those of collectors."""
    registry = CollectorRegistry()
    registry.register(BackendCollector(backend))
    registry.register(MemoryCollector(backend))
    for collector in (_RegistryCollector(request_metrics.registry), *collectors):
        registry.register(collector if others is None else others.added_to(collector))
    return registry


class BackendCollector(Collector):
    """The engines' numbers, of every model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not query a backend that has not started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        names = [card.name for card in self._backend.models()]
        stats = {name: self._backend.model(name).stats for name in names}
        for name, text, label, values in _GAUGES:
            gauge = GaugeMetricFamily(f"loraplex_{name}", text, labels=_labels(label))
            yield _filled(gauge, stats, label, values)
        for name, text, label, values in _COUNTERS:
            counter = CounterMetricFamily(f"loraplex_{name}", text, labels=_labels(label))
            yield _filled(counter, stats, label, values)
        yield from self._of_models(names)

    def _of_models(self, names: list[str]) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "loraplex_model_ready", "1 if the model would serve a request now.", labels=["model"]
        )
        registered = GaugeMetricFamily(
            "loraplex_adapters_registered", "Adapters that requests can use.", labels=["model"]
        )
        restarts = CounterMetricFamily(
            "loraplex_engine_restarts",
            "Engines that were started again, by why the one before ended: crash (by itself), hang "
            "(no progress, see step_timeout_seconds), kill (from outside, as without memory).",
            labels=["model", "reason"],
        )
        for name in names:
            for reason, number in self._backend.model(name).engine_restarts.items():
                restarts.add_metric([name, reason], number)
            ready.add_metric([name], self._backend.model_ready(name))
            registered.add_metric([name], len(self._backend.model(name).adapter_names()))
        yield ready
        yield registered
        yield restarts


class _RegistryCollector(Collector):
    """Another registry as a part of this one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


def _labels(label: str | None) -> list[str]:
    return ["model"] if label is None else ["model", label]


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    stats: dict[str, EngineStats],
    label: str | None,
    values: Callable[[EngineStats], dict[str, float]],
) -> Metric:
    for model, of_model in stats.items():
        for label_value, value in values(of_model).items():
            family.add_metric([model] if label is None else [model, label_value], value)
    return family


def described_metrics(app: ASGIApp) -> Described:
    """Describe the guarded app of the metrics, as a route of another app."""
    operation = Operation(
        responses=(ResponseDoc(200, (Media(TEXT), Media("application/openmetrics-text"))),),
        tag="operations",
        about="What requests did and what engines do, for Prometheus.",
        error_responses=guard_responses,
    )
    return Described(app, {"GET": operation})
