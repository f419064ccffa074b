"""The one place that a request on any wire passes at its begin and at its end."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from loraplex.frontends.telemetry.request_ids import HEADER, request_id
from loraplex.frontends.telemetry.trace_context import trace_parent
from loraplex.serving.wire_request import WireRequest

logger = logging.getLogger(__name__)

MAX_USER_AGENT = 200

Sink = Callable[[WireRequest], None]
"""Writes a request down when it has ended. It is called on any thread, and must not block."""


class TenantUse(msgspec.Struct):
    """What a tenant had so far, over every protocol. Of requests that have ended."""

    requests: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: int = 0


class Telemetry(Collector):
    """Requests in work and those that ended: counted, and given to the sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = sinks
        self._lock = threading.Lock()
        self._tenants: dict[str, TenantUse] = {}
        self._registry = CollectorRegistry()
        self._open = Gauge(
            "loraplex_open_requests",
            "Requests on the wire that have not ended, whatever they ask for.",
            ["protocol"],
            registry=self._registry,
        )
        self._answered = Counter(
            "loraplex_wire_requests",
            "Requests on the wire that ended, by status and by the code of the error, which is "
            "empty without one.",
            ["protocol", "status", "code"],
            registry=self._registry,
        )

    def begin(
        self,
        protocol: str,
        method: str,
        path: str,
        client: str,
        headers: Mapping[str, str],
        route: str = "",
    ) -> WireRequest:
        """A request has come. headers: by lower-case name. Whoever begins it ends it."""
        self._open.labels(protocol).inc()
        return WireRequest(
            protocol=protocol,
            method=method,
            path=path,
            client=client,
            request_id=request_id(headers.get(HEADER, "")),
            trace=trace_parent(headers),
            user_agent=headers.get("user-agent", "")[:MAX_USER_AGENT],
            on_end=self._end,
            route=route,
        )

    @property
    def num_open(self) -> dict[str, int]:
        """By protocol."""
        samples = (sample for metric in self._open.collect() for sample in metric.samples)
        return {sample.labels["protocol"]: int(sample.value) for sample in samples}

    @property
    def tenants(self) -> dict[str, TenantUse]:
        with self._lock:
            return {name: msgspec.structs.replace(use) for name, use in self._tenants.items()}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def _end(self, request: WireRequest) -> None:
        if not request.is_within:
            self._open.labels(request.protocol).dec()
        self._answered.labels(request.protocol, request.status, request.error_code).inc()
        if request.tenant:
            self._count(request)
        for sink in self._sinks:
            try:
                sink(request)
            except Exception:  # the request was answered: that stands
                logger.exception("request %s could not be written down", request.request_id)

    def _count(self, request: WireRequest) -> None:
        with self._lock:
            use = self._tenants.setdefault(request.tenant, TenantUse())
            use.requests += 1
            use.errors += bool(request.error_code)
            use.prompts += len(request.generations)
            for record in request.generations:
                use.prompt_tokens += record.num_prompt_tokens
                use.completion_tokens += record.num_output_tokens
