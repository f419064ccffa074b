"""HTTP connections: how many are open, and which were refused before a request was read."""

from collections import Counter

from loraplex.frontends.metric_families import Family, TableCollector, counter


class HttpConnections(TableCollector):
    """Counts of one port's connections; one event loop updates them."""

    families = (
        Family("loraplex_http_connections", "Open HTTP connections.", "num_open"),
        counter(
            "loraplex_http_refused",
            "Connections closed before a request was read, by reason.",
            lambda own: dict(sorted(own.num_refused.items())),
            ("code",),
        ),
    )

    def __init__(self) -> None:
        self.num_open = 0
        self._refused: Counter[str] = Counter()

    def refused(self, code: str) -> None:
        """Count a refused connection. code: the error's, or `idle` if nothing was sent."""
        self._refused[code] += 1

    @property
    def num_refused(self) -> dict[str, int]:
        return dict(self._refused)
