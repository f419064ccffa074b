"""GET /v1/internal/stats: one look at the whole server, for people and their scripts.

Values are current, or counted since the start. Prometheus has more, and keeps history.
"""

import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from loraplex.core.stats import EngineStats
from loraplex.core.version import __version__
from loraplex.frontends.ops.latencies import FRESH_SECONDS, Latencies, LatencyBounds, LatencyCounts
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.frontends.telemetry.line_writer import LineWriter
from loraplex.frontends.telemetry.telemetry import Telemetry, TenantUse
from loraplex.serving.backend import Backend
from loraplex.serving.draining import Draining, DrainReport

_MAX_WAITING = 32
"""Adapters whose waiting sequences are reported."""


class ConnectionReport(msgspec.Struct, frozen=True):
    open: int
    refused: dict[str, int]
    """Refused connections by reason."""


class LogReport(msgspec.Struct, frozen=True):
    waiting_lines: int
    dropped_lines: int


class ModelReport(msgspec.Struct, frozen=True):
    ready: bool
    engine: EngineStats
    """`queue` and `adapters` are in it."""
    latencies: LatencyCounts
    waiting: dict[str, int]
    """Waiting sequences by adapter digest, of the adapters that most of them wait for."""


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    uptime_seconds: float
    live: bool
    ready: bool
    reason: str
    """Empty if it is ready."""
    drain: DrainReport
    open_requests: dict[str, int]
    """Open requests by protocol."""
    http_connections: ConnectionReport
    access_log: LogReport | None
    """None without one."""
    tenants: dict[str, TenantUse]
    latency_bounds: LatencyBounds
    models: dict[str, ModelReport]


class ServerStats:
    """Joins the reports of the parts of a server."""

    def __init__(
        self,
        backend: Backend,
        telemetry: Telemetry,
        draining: Draining,
        connections: HttpConnections,
        latencies: Latencies,
        access_log: LineWriter | None = None,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._telemetry = telemetry
        self._draining = draining
        self._connections = connections
        self._latencies = latencies
        self._access_log = access_log
        self._seconds = seconds
        self._started = seconds()
        self._waiting: dict[str, tuple[float, dict[str, int]]] = {}
        """Time in seconds, and the waiting sequences at that time, by model."""

    async def report(self, models: list[str]) -> ServerReport:
        """Return a report with the engines of these models."""
        await self._latencies.refresh()
        latencies = self._latencies.by_model(models)
        health = self._backend.health()
        return ServerReport(
            version=__version__,
            uptime_seconds=round(self._seconds() - self._started, 3),
            live=health.live,
            ready=health.ready,
            reason=health.reason,
            drain=self._draining.report(),
            open_requests=self._telemetry.num_open,
            http_connections=ConnectionReport(
                self._connections.num_open, self._connections.num_refused
            ),
            access_log=self._log_report(),
            tenants=self._telemetry.tenants,
            latency_bounds=LatencyBounds(),
            models={name: await self._of_model(name, latencies[name]) for name in models},
        )

    def _log_report(self) -> LogReport | None:
        log = self._access_log
        return None if log is None else LogReport(log.num_waiting, log.num_dropped)

    async def _of_model(self, name: str, latencies: LatencyCounts) -> ModelReport:
        stats = self._backend.model(name).stats
        waiting = await self._waiting_of(name) if stats.num_waiting else {}
        return ModelReport(self._backend.model_ready(name), stats, latencies, waiting)

    async def _waiting_of(self, name: str) -> dict[str, int]:
        """Return what the engine said, which is queried once for all viewers."""
        since, waiting = self._waiting.get(name, (-math.inf, {}))
        now = self._seconds()
        if now - since >= FRESH_SECONDS:
            activity = await self._backend.model(name).adapter_activity()
            waiting = dict(Counter(activity.waiting).most_common(_MAX_WAITING))
            self._waiting[name] = now, waiting
        return waiting
