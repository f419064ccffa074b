"""GET /metrics: what requests did and what engines do, as Prometheus text.

Engines' numbers are read from `Backend.stats` for each scrape; nothing is kept here.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from loraplex.core.principal import LOCAL
from loraplex.core.stats import EngineStats
from loraplex.frontends.openapi.operation import TEXT, Described, Media, Operation, ResponseDoc
from loraplex.frontends.ops.gateway_metrics import GatewayCollector
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


def metrics_app(
    backend: Backend,
    request_metrics: RequestMetrics,
    collectors: Iterable[Collector] = (),
    has_gauges: Callable[[str], bool] | None = None,
) -> ASGIApp:
    """An app with one route, GET /metrics; for a port of its own or to be mounted.

    collectors: of other front ends. has_gauges: whether a base model has vLLM's gauges; None: all.
    """
    return Starlette(routes=metrics_routes(backend, request_metrics, collectors, has_gauges))


def metrics_routes(
    backend: Backend,
    request_metrics: RequestMetrics,
    collectors: Iterable[Collector] = (),
    has_gauges: Callable[[str], bool] | None = None,
) -> list[Route]:
    """Return the routes: OpenMetrics for clients that accept it, else Prometheus' text format."""
    gateway = GatewayCollector(backend, has_gauges)
    registry = metrics_registry(backend, request_metrics, [gateway, *collectors])

    async def metrics(request: Request) -> Response:
        await gateway.refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        text = encode(registry)
        if content_type.startswith("text/plain"):
            text = as_originals_write(text)
        return Response(text, headers={"content-type": content_type})

    return [Route("/metrics", metrics, methods=["GET"])]


def metrics_registry(
    backend: Backend, request_metrics: RequestMetrics, collectors: Iterable[Collector]
) -> CollectorRegistry:
    """All families: the engines', the requests', and those of collectors."""
    registry = CollectorRegistry()
    registry.register(BackendCollector(backend))
    registry.register(MemoryCollector(backend))
    registry.register(_RegistryCollector(request_metrics.registry))
    for collector in collectors:
        registry.register(collector)
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
            registered.add_metric([name], len(self._backend.adapters(LOCAL, name)))
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
