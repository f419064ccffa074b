"""Shared adapter declarations, as Prometheus families."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.serving.adapters.declared_adapters import DeclarationStatus


class DeclarationCollector(Collector):
    """Gauges of a server that follows declarations."""

    def __init__(self, status: Callable[[], DeclarationStatus]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """Return nothing: no declarations have been read yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        adapters = GaugeMetricFamily(
            "loraplex_declared_adapters",
            "Adapters in the shared declarations: outdated (another version is served until the "
            "declared one is complete), failing (the last load failed), all.",
            labels=["state"],
        )
        adapters.add_metric(["all"], status.num_adapters)
        adapters.add_metric(["outdated"], status.num_outdated)
        adapters.add_metric(["failing"], status.num_failing)
        yield adapters
        yield GaugeMetricFamily(
            "loraplex_adapter_declarations_age_seconds",
            "Time since the shared declarations were read completely.",
            value=status.age_seconds,
        )
