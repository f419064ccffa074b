"""Triton's own families of GET /metrics: nv_inference_*, with its names and texts."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.core.metrics_config import MetricsConfig
from loraplex.frontends.kserve.latencies import RecentValues
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.statistics import Durations, ModelCounts, Statistics
from loraplex.frontends.prometheus_text import ExactCounter

LABELS = ("model", "version")


_Row = tuple[dict[str, str], ModelCounts]
"""(labels, counts) of a model."""

_DURATIONS: tuple[tuple[str, str, Callable[[ModelCounts], Durations]], ...] = (
    (
        "request",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda counts: counts.success,
    ),
    (
        "queue",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda counts: counts.queue,
    ),
    (
        "compute_input",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda counts: counts.phases.compute_input,
    ),
    (
        "compute_infer",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda counts: counts.phases.compute_infer,
    ),
    (
        "compute_output",
        "Cumulative inference compute output duration in microseconds (does not include cached "
        "requests)",
        lambda counts: counts.phases.compute_output,
    ),
)

_COUNTS: tuple[tuple[str, str, Callable[[ModelCounts], float]], ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda counts: counts.success.count,
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda counts: counts.num_inferences,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda counts: counts.success.count,
    ),
)


class InferenceCollector(Collector):
    """Metrics of every loaded model, from its statistics."""

    def __init__(self, catalog: Catalog, statistics: Statistics, config: MetricsConfig) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._config = config

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not call a backend that has not started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        rows = [
            ({"model": model.name, "version": model.version}, self._statistics.of(model.name))
            for model in self._catalog.models()
        ]
        for name, text, value in _COUNTS:
            yield _filled(name, text, [(labels, value(counts)) for labels, counts in rows])
        yield _filled(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            [
                (
                    {
                        "model": labels["model"],
                        "reason": reason.value,
                        "version": labels["version"],
                    },
                    n,
                )
                for labels, counts in rows
                for reason, n in counts.failures.items()
            ],
        )
        yield from self._latencies(rows)
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            labels=LABELS,
        )
        for labels, counts in rows:
            pending.add_metric([labels["model"], labels["version"]], counts.num_pending)
        yield pending

    def _latencies(self, rows: Sequence[_Row]) -> Iterator[Metric]:
        """Latencies in the configured forms."""
        for name, text, durations in _DURATIONS:
            if self._config.counter_latencies:
                micros = [(labels, durations(counts).ns // 1000) for labels, counts in rows]
                yield _filled(f"nv_inference_{name}_duration_us", text, micros)
            if self._config.summary_latencies:
                text = text.replace("Cumulative", "Summary of")
                family = Metric(f"nv_inference_{name}_summary_us", text, "summary")
                for labels, counts in rows:
                    window = getattr(counts.latencies, name)
                    self._add_summary(family, labels, durations(counts), window)
                yield family
        if self._config.histogram_latencies:
            yield _first_responses(rows)

    def _add_summary(
        self, family: Metric, labels: dict[str, str], all_time: Durations, window: RecentValues
    ) -> None:
        """Count and sum are of all time, quantiles of the window."""
        quantiles = self._config.quantiles
        for quantile, value in zip(quantiles, window.quantiles(quantiles), strict=True):
            family.add_sample(family.name, {**labels, "quantile": f"{quantile:g}"}, value)
        family.add_sample(f"{family.name}_count", labels, all_time.count)
        family.add_sample(f"{family.name}_sum", labels, all_time.ns // 1000)


def _first_responses(rows: Sequence[_Row]) -> Metric:
    family = HistogramMetricFamily(
        "nv_inference_first_response_histogram_ms",
        "Duration from request to first response in milliseconds",
        labels=LABELS,
    )
    for labels, counts in rows:
        if counts.latencies is not None:
            histogram = counts.latencies.first_response
            family.add_metric(list(labels.values()), histogram.cumulative(), histogram.sum)
    return family


def _filled(name: str, text: str, values: Iterable[tuple[dict[str, str], float]]) -> ExactCounter:
    counter = ExactCounter(name, text)
    for labels, value in values:
        counter.add(labels, value)
    return counter
