"""Latencies counted in buckets: the difference of two polls has the percentiles between them."""

import itertools
from collections.abc import Iterable

import msgspec
from prometheus_client.registry import Collector

from loraplex.frontends.ops.frontend_numbers import FrontendNumbers
from loraplex.serving.request_metrics import (
    INTER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
    RequestMetrics,
)

FRESH_SECONDS = 0.4
"""Viewers poll twice a second: the other processes count once for all of them."""


class LatencyBounds(msgspec.Struct, frozen=True):
    """Upper bounds of the buckets in seconds; one more bucket has all longer times."""

    time_to_first_token: tuple[float, ...] = TTFT_BUCKETS
    inter_token_latency: tuple[float, ...] = INTER_TOKEN_BUCKETS
    e2e_latency: tuple[float, ...] = REQUEST_BUCKETS


_BOUNDS: tuple[tuple[float, ...], ...] = msgspec.structs.astuple(LatencyBounds())


class LatencyCounts(msgspec.Struct, frozen=True):
    """Number of times in each bucket since the start, not cumulative."""

    time_to_first_token: tuple[int, ...]
    inter_token_latency: tuple[int, ...]
    e2e_latency: tuple[int, ...]


class Latencies:
    """Latencies of the requests of all front-end processes."""

    def __init__(self, metrics: RequestMetrics, others: FrontendNumbers | None = None) -> None:
        kinds: tuple[Collector, ...] = (
            metrics.time_to_first_token,
            metrics.inter_token_latency,
            metrics.e2e_latency,
        )
        self._others = others
        self._kinds = kinds if others is None else tuple(map(others.added_to, kinds))

    async def refresh(self) -> None:
        """Collect from the other processes; call it before `by_model`."""
        if self._others is not None:
            await self._others.refresh(FRESH_SECONDS)

    def by_model(self, models: Iterable[str]) -> dict[str, LatencyCounts]:
        """Return the counts of these models."""
        kinds = [
            (_by_model(kind), (0,) * (len(bounds) + 1))
            for kind, bounds in zip(self._kinds, _BOUNDS, strict=True)
        ]
        return {
            model: LatencyCounts(*(counts.get(model, zeros) for counts, zeros in kinds))
            for model in models
        }


def _by_model(histogram: Collector) -> dict[str, tuple[int, ...]]:
    """Return the counts of each model that has some."""
    cumulative: dict[str, dict[float, int]] = {}
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                of_model = cumulative.setdefault(sample.labels["model"], {})
                of_model[float(sample.labels["le"])] = int(sample.value)
    return {
        model: _differences([buckets[bound] for bound in sorted(buckets)])
        for model, buckets in cumulative.items()
    }


def _differences(cumulative: list[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in itertools.pairwise([0, *cumulative]))
