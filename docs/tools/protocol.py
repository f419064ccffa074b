"""Rows of a server's routes, RPCs and metrics, from the objects that implement them."""

import re
from collections.abc import Iterable

from prometheus_client.core import Metric
from tritonclient.grpc import service_pb2

from loraplex.core.metrics_config import MetricsConfig
from loraplex.core.support import Feature, Support, support_of
from loraplex.frontends.kserve.grpc.health import SERVICE as HEALTH_SERVICE
from loraplex.frontends.kserve.grpc.servicer import TritonServicer
from loraplex.frontends.kserve.grpc.stream import ERRORS_END_STREAM
from loraplex.frontends.kserve.http.infer import HEADER_LENGTH
from loraplex.frontends.kserve.http.routes import Resource, kserve_routes
from loraplex.frontends.kserve.management import FIXED_TRACE_SETTINGS, OTHER_LOG_NAMES
from loraplex.frontends.kserve.management import LOG_DEFAULTS as LOG_SETTINGS
from loraplex.frontends.kserve.management import TRACE_DEFAULTS as TRACE_SETTINGS
from loraplex.frontends.kserve.models.catalog import EXTENSIONS
from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.metric_families import ExactCounter
from loraplex.frontends.ops.gateway_metrics import GatewayCollector
from loraplex.frontends.ops.metrics import metrics_registry
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService
from tools.not_served import ABSENT_METRICS

_SERVICE = "GRPCInferenceService"
_CONVERTER = re.compile(r":\w+}")
_FREE_LABELS = frozenset(
    {
        *("model", "version", "model_name", "adapter", "le", "quantile"),
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        *("adapter_name", "level", "pinned", "block_size", "num_gpu_blocks"),
    }
)
_OURS = "loraplex_"
_MODEL = EchoService().models()[0].name
_DECLARATIONS = tuple(
    ModelDeclaration(
        name=name,
        kind=TENSORRT_LLM,
        base_model=_MODEL,
        max_batch_size=1,
        options=ModelOptions(is_static=name == "static"),
    )
    for name in ("inflight", "static")
)


def route_features() -> tuple[Feature, ...]:
    routes = kserve_routes(TritonService(EchoService()))
    rows = []
    for route in routes:
        assert isinstance(route.endpoint, Resource)
        path = _CONVERTER.sub("}", route.path)
        for method, support, note in route.endpoint.features:
            rows.append(Feature(f"{method} {path}", support, note))
    return tuple(rows)


def rpc_features() -> tuple[Feature, ...]:
    """RPCs of the service; those that the servicer does not have return UNIMPLEMENTED."""
    methods = service_pb2.DESCRIPTOR.services_by_name[_SERVICE].methods
    rows = [_rpc(method.name) for method in methods]
    return (*rows, *(Feature(f"{HEALTH_SERVICE}/{name}") for name in ("Check", "Watch")))


def _rpc(name: str) -> Feature:
    method = getattr(TritonServicer, name, None)
    if method is None:
        return Feature(name, Support.REFUSED, "UNIMPLEMENTED")
    return Feature(name, *support_of(method))


def header_features() -> tuple[Feature, ...]:
    return (
        Feature(HEADER_LENGTH, note="bytes of JSON before binary data"),
        Feature(
            "endpoint-load-metrics-format",
            Support.NO_EFFECT,
            "the response has no load: /metrics has it",
        ),
        Feature("endpoint-load-metrics", Support.REFUSED, "gateways read /metrics"),
        Feature("Content-Encoding", note="gzip or deflate, of infer"),
        Feature("Accept-Encoding", note="gzip or deflate, of infer"),
        Feature(ERRORS_END_STREAM, note="gRPC metadata; true: an error ends a stream"),
    )


def setting_features() -> tuple[Feature, ...]:
    """Return the settings of the trace and logging extensions."""
    return (*map(_trace_setting, TRACE_SETTINGS), *map(_log_setting, LOG_SETTINGS))


def _trace_setting(name: str) -> Feature:
    if name in FIXED_TRACE_SETTINGS:
        return Feature(name, Support.REFUSED, "returned; a change is an error, as in Triton")
    return Feature(name, Support.NO_EFFECT, "kept and returned; nothing is traced by it")


def _log_setting(name: str) -> Feature:
    others = tuple(other for other, meant in OTHER_LOG_NAMES.items() if meant == name)
    match name:
        case "log_file":
            return Feature(name, Support.REFUSED, "returned; a change is an error, as in Triton")
        case "log_format":
            return Feature(name, Support.NO_EFFECT, "kept and returned")
    return Feature(name, note="the level of the log", other_names=others)


def extension_features() -> tuple[Feature, ...]:
    return tuple(Feature(name) for name in EXTENSIONS)


def metric_features() -> tuple[Feature, ...]:
    rows = sorted(map(_metric, _families()), key=lambda row: row.is_ours)
    return (*rows, *ABSENT_METRICS)


def label_features() -> tuple[Feature, ...]:
    """Return the label values of the replaced systems' families that are not names."""
    return tuple(
        Feature(f"{name}={value}", note=f"of {family.name}")
        for family in _families()
        if not _is_ours(family)
        for name, value in _labels(family)
    )


def _families() -> Iterable[Metric]:
    """Return the metrics of a server with a model of each kind of batching."""
    backend = EchoService()
    everything = MetricsConfig(histogram_latencies=True, summary_latencies=True)
    service = TritonService(backend, declarations=_DECLARATIONS, metrics=everything)
    collectors = [GatewayCollector(backend), *service.collectors()]
    return metrics_registry(backend, RequestMetrics(), collectors).collect()


def _metric(family: Metric) -> Feature:
    suffix = "_total" if family.type == "counter" and not family.name.startswith("nv_") else ""
    kind = "counter" if isinstance(family, ExactCounter) else family.type
    note = family.documentation.rstrip(".").replace(": ", ", ") if _is_ours(family) else ""
    return Feature(f"{family.name}{suffix}", note=note, form=kind, is_ours=_is_ours(family))


def _is_ours(family: Metric) -> bool:
    return family.name.startswith(_OURS)


def _labels(family: Metric) -> Iterable[tuple[str, str]]:
    labels = (label for sample in family.samples for label in sample.labels.items())
    return dict.fromkeys((name, value) for name, value in labels if name not in _FREE_LABELS)
