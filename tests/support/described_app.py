"""The whole app of the HTTP port over a backend that computes nothing."""

from starlette.types import ASGIApp

from loraplex.app.http_app import http_app
from loraplex.app.reporting import Reporting
from loraplex.core.clock import SystemClock
from loraplex.core.config import Config
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.models.model_control import ModelControl
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.ops.history import History
from loraplex.frontends.ops.latencies import Latencies
from loraplex.frontends.ops.metrics import metrics_app
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.frontends.telemetry.recent_requests import RecentRequests
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.backend import Backend
from loraplex.serving.draining import Draining
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.response_memory import ResponseMemory

TEST_HOST = "testserver"
"""Name under which test clients reach an app, and schemathesis after them."""


def described_app(
    backend: Backend,
    authenticate: Authenticate = everyone_is_local,
    settings: ServerConfig | None = None,
    control: ModelControl | None = None,
) -> ASGIApp:
    """authenticate: everyone_is_local is a server without keys."""
    triton = TritonService(backend, control=control)
    # The console's pages are no part of the API.
    settings = settings or ServerConfig(allowed_hosts=(TEST_HOST,), console="off")
    recent = RecentRequests(settings.recent_requests)
    has_keys = authenticate is not everyone_is_local
    metrics = RequestMetrics()
    latencies = Latencies(metrics)
    return http_app(
        backend,
        Draining(SystemClock(), lambda: 0, print),
        triton,
        Config(server=settings),
        authenticate,
        Reporting(Telemetry([recent]), HttpConnections(), None, None, recent),
        metrics=metrics_app(backend, metrics, triton.collectors()),
        history=History(backend, latencies),
        latencies=latencies,
        bodies=BodyMemory.of(settings, has_keys=has_keys),
        responses=ResponseMemory(),
        has_keys=has_keys,
    )
