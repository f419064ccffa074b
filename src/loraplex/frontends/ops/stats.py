"""GET /v1/internal/stats: one look at the whole server, for people and their scripts.

What it tells is of now, or counted since the start. Prometheus has more, and keeps it.
"""

import time
from typing import Any

import msgspec

from loraplex.core.version import __version__
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.frontends.telemetry.line_writer import LineWriter
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.backend import Backend
from loraplex.serving.draining import Draining


class ServerStats:
    """What the parts of a server say of themselves, joined."""

    def __init__(
        self,
        backend: Backend,
        telemetry: Telemetry,
        draining: Draining,
        connections: HttpConnections,
        access_log: LineWriter | None = None,
    ) -> None:
        self._backend = backend
        self._telemetry = telemetry
        self._draining = draining
        self._connections = connections
        self._access_log = access_log
        self._started_ns = time.monotonic_ns()

    def report(self, models: list[str]) -> dict[str, Any]:
        """With the engines of these models."""
        health = self._backend.health()
        return {
            "version": __version__,
            "uptime_seconds": round((time.monotonic_ns() - self._started_ns) / 1e9, 3),
            "live": health.live,
            "ready": health.ready,
            "reason": health.reason,
            "drain": self._draining.report(),
            "open_requests": self._telemetry.num_open,
            "http_connections": {
                "open": self._connections.num_open,
                "refused": self._connections.num_refused,
            },
            "access_log": self._log_report(),
            "tenants": self._telemetry.tenants,
            "models": {name: self._of_model(name) for name in models},
        }

    def _log_report(self) -> dict[str, int] | None:
        """None without one."""
        log = self._access_log
        if log is None:
            return None
        return {"waiting_lines": log.num_waiting, "dropped_lines": log.num_dropped}

    def _of_model(self, name: str) -> dict[str, Any]:
        """`queue` and `adapters` are in the engine's numbers."""
        return {
            "ready": self._backend.model_ready(name),
            "engine": msgspec.to_builtins(self._backend.stats(name)),
        }
