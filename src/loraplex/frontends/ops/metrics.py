"""GET /metrics: what requests did and what engines do, as Prometheus text.

Engines' numbers are read from `Backend.stats`; the text of one scrape serves those right after it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from loraplex.core.server_config import ServerConfig
from loraplex.frontends.metric_families import FunctionCollector, as_originals_write
from loraplex.frontends.openapi.operation import TEXT, Described, Media, Operation, ResponseDoc
from loraplex.frontends.ops.engine_families import engine_collector
from loraplex.frontends.ops.frontend_numbers import FrontendNumbers
from loraplex.frontends.ops.gateway_metrics import MAX_ADAPTERS, GatewayCollector
from loraplex.frontends.ops.responses import guard_responses
from loraplex.serving.backend import Backend
from loraplex.serving.request_metrics import RequestMetrics

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
    registry.register(engine_collector(backend))
    of_requests = FunctionCollector(request_metrics.registry.collect)
    for collector in (of_requests, *collectors):
        registry.register(collector if others is None else others.added_to(collector))
    return registry


def described_metrics(app: ASGIApp) -> Described:
    """Describe the guarded app of the metrics, as a route of another app."""
    operation = Operation(
        responses=(ResponseDoc(200, (Media(TEXT), Media("application/openmetrics-text"))),),
        tag="operations",
        about="What requests did and what engines do, for Prometheus.",
        error_responses=guard_responses,
    )
    return Described(app, {"GET": operation})
