"""HTTP connections: how many are open, and which were refused before a request was read."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class HttpConnections(Collector):
    """Counts of one port's connections; one event loop updates them."""

    def __init__(self) -> None:
        self.num_open = 0
        self._refused: Counter[str] = Counter()

    def refused(self, code: str) -> None:
        """Count a refused connection. code: the error's, or `idle` if nothing was sent."""
        self._refused[code] += 1

    @property
    def num_refused(self) -> dict[str, int]:
        return dict(self._refused)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "loraplex_http_connections", "Open HTTP connections.", value=self.num_open
        )
        refused = CounterMetricFamily(
            "loraplex_http_refused",
            "Connections closed before a request was read, by reason.",
            labels=["code"],
        )
        for code, number in sorted(self._refused.items()):
            refused.add_metric([code], number)
        yield refused
