"""Spans over OTLP/HTTP, by OpenTelemetry's SDK: the extra `tracing` has it.

The SDK reads the rest from its own variables (OTEL_*): headers, timeouts, the
sampler, the service's name and other attributes of the resource, the sizes of batches.
"""

import threading

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from loraplex.core.version import __version__
from loraplex.frontends.telemetry.spans import SpanTree, span_tree
from loraplex.serving.wire_request import TraceParent, WireRequest

_CLOSE_SECONDS = 5.0


class OtlpTraces:
    """Sink of `Telemetry`. Spans wait in a bounded queue for a thread that sends them; spans that
    the collector does not accept are lost, and no request waits for them.
    """

    def __init__(self, endpoint: str, service_name: str | None) -> None:
        """Create a sink that posts to an endpoint. service_name None: as in the SDK's variables."""
        self._ids = _GivenTraceIds()
        attributes: dict[str, str] = {SERVICE_VERSION: __version__}
        if service_name is not None:
            attributes[SERVICE_NAME] = service_name
        self._provider = TracerProvider(
            resource=Resource.create(attributes), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("loraplex", __version__)

    def __call__(self, request: WireRequest) -> None:
        self._ids.use(int(request.trace.trace_id, 16))
        _emit(self._tracer, span_tree(request), _context_of(request.trace), SpanKind.SERVER)

    def close(self) -> None:
        """Send what waits, as far as a collector takes it within seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class _GivenTraceIds(RandomIdGenerator):
    """The trace of a request that came without one was named when it came: it is in the logs."""

    def __init__(self) -> None:
        self._given = threading.local()

    def use(self, trace_id: int) -> None:
        """Use this id for the next trace that this thread begins."""
        self._given.trace_id = trace_id

    def generate_trace_id(self) -> int:
        return int(self._given.trace_id)


def _context_of(parent: TraceParent) -> Context:
    """The context of the caller's span; without one an empty context, which begins a trace."""
    if not parent.span_id:
        return Context()
    flags = TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT
    caller = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(flags),
        trace_state=TraceState.from_header([parent.state]),
    )
    return set_span_in_context(NonRecordingSpan(caller), Context())


def _emit(tracer: Tracer, tree: SpanTree, within: Context, kind: SpanKind) -> None:
    span = tracer.start_span(
        tree.name, within, kind=kind, attributes=dict(tree.attributes), start_time=tree.start_ns
    )
    if tree.failure:
        span.set_status(Status(StatusCode.ERROR, tree.failure))
    inner = set_span_in_context(span, within)
    for child in tree.children:
        _emit(tracer, child, inner, SpanKind.INTERNAL)
    span.end(tree.end_ns)
