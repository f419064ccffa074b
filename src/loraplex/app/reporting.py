"""Reports on requests, as configured: the access log, traces and counts."""

import contextlib
import dataclasses
from collections.abc import Iterator

from prometheus_client.registry import Collector

from loraplex.app.access import PROBED_PATHS
from loraplex.core.environment import trace_target
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.telemetry.access_log import AccessLog
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.frontends.telemetry.line_writer import LineWriter
from loraplex.frontends.telemetry.recent_requests import RecentRequests
from loraplex.frontends.telemetry.request_lines import RequestLines
from loraplex.frontends.telemetry.telemetry import Sink, Telemetry
from loraplex.frontends.telemetry.tracing import Traces, open_traces


@dataclasses.dataclass(frozen=True)
class Reporting:
    """Destinations of reports."""

    telemetry: Telemetry
    connections: HttpConnections
    """Connections of the HTTP port, without those of the metrics port."""
    access_log: LineWriter | None
    traces: Traces | None
    recent: RecentRequests

    def collectors(self) -> list[Collector]:
        """Return the collectors for GET /metrics."""
        log = [] if self.access_log is None else [self.access_log]
        return [self.telemetry, self.connections, *log]


@contextlib.contextmanager
def reporting_requests(settings: ServerConfig) -> Iterator[Reporting]:
    """Open the destinations of reports; on leaving, write and send what is pending. Raises
    ConfigError."""
    with contextlib.ExitStack() as stack:
        recent = RecentRequests(settings.recent_requests)
        sinks: list[Sink] = [recent]
        access_log = traces = None
        if settings.log_requests != "off":
            is_sampled = settings.log_requests == "sampled"
            sinks.append(RequestLines(is_sampled=is_sampled, probes=PROBED_PATHS))
        if settings.access_log:
            access_log = LineWriter(settings.access_log)
            stack.callback(access_log.close)
            sinks.append(AccessLog(access_log, with_prompts=settings.access_log_prompts))
        target = trace_target(settings.otlp_endpoint)
        if target is not None:
            traces = open_traces(target)
        if traces is not None:
            stack.callback(traces.close)
            sinks.append(traces)
        yield Reporting(Telemetry(sinks), HttpConnections(), access_log, traces, recent)
