"""Metrics of all front-end processes as those of one server."""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from loraplex.frontends.metric_families import FunctionCollector

_GAUGE = "gauge"
_CREATED = "_created"
_SUFFIXES = ("", "_total", "_bucket", "_count", "_sum", _CREATED)
_Series = tuple[str, tuple[tuple[str, str], ...]]
"""(name, labels) of a sample."""


class _Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


_DECODER = msgspec.msgpack.Decoder(list[_Family])


class _Collects(Protocol):
    """A Collector or a registry."""

    def collect(self) -> Iterable[Metric]: ...


def encoded_families(collectors: Iterable[_Collects]) -> bytes:
    """Return all samples of a process, for the owner's FrontendNumbers."""
    families = [
        _Family(
            metric.name,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for collector in collectors
        for metric in collector.collect()
    ]
    return msgspec.msgpack.encode(families)


class FrontendNumbers:
    """What the other front-end processes count, to be added to what this one counts."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self.count: Callable[[], Awaitable[Sequence[bytes]]] = _no_processes
        """Function that returns the samples of the processes that run, as of now."""
        self._now: list[dict[_Series, float]] = []
        self._ended: dict[_Series, float] = {}
        """Counts of processes that have ended."""
        self._seconds = seconds
        self._refreshed = -math.inf
        """Time of the last refresh in seconds."""

    async def refresh(self, fresh_seconds: float = 0) -> None:
        """Collect from the processes, unless that was done within fresh_seconds.

        Call it before each scrape.
        """
        if self._seconds() - self._refreshed >= fresh_seconds:
            self._refreshed = self._seconds()
            self._now = [_samples(data) for data in await self.count()]

    def keep(self, data: bytes) -> None:
        """Keep the counts of a process that has ended: counters never fall."""
        for series, value in _samples(data, with_gauges=False).items():
            self._ended[series] = _added(series, self._ended.get(series), value)

    def added_to(self, collector: Collector) -> Collector:
        """Return a collector whose values are those of all processes."""

        def collect() -> Iterator[Metric]:
            others = [*self._now, self._ended]
            for metric in collector.collect():
                yield _summed(metric, others)

        return FunctionCollector(collect)


async def _no_processes() -> Sequence[bytes]:
    return ()


def _summed(metric: Metric, others: Iterable[dict[_Series, float]]) -> Metric:
    values = {_series(sample.name, sample.labels): sample.value for sample in metric.samples}
    names = {metric.name + suffix for suffix in _SUFFIXES}
    for samples in others:
        for series, value in samples.items():
            if series[0] in names:
                values[series] = _added(series, values.get(series), value)
    whole = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    for (name, labels), value in values.items():
        whole.add_sample(name, dict(labels), value)
    return whole


def _samples(data: bytes, *, with_gauges: bool = True) -> dict[_Series, float]:
    return {
        _series(name, labels): value
        for family in (_DECODER.decode(data) if data else ())
        if with_gauges or family.type != _GAUGE
        for name, labels, value in family.samples
    }


def _series(name: str, labels: dict[str, str]) -> _Series:
    return name, tuple(labels.items())


def _added(series: _Series, present: float | None, value: float) -> float:
    if present is None:
        return value
    return min(present, value) if series[0].endswith(_CREATED) else present + value


class OtherFrontends:
    """Sources of what the processes know; those who run the processes set them."""

    def __init__(self) -> None:
        self.numbers = FrontendNumbers()
        self.restarts = Counter[str]()
        """Number of processes that ended and were replaced, by how they ended."""
        self.requests: Callable[[bytes], Awaitable[Sequence[bytes]]] = _no_pages
        """Function from a RequestQuery to the RequestPage of each process, as JSON; empty for a
        process that does not reply in time."""


async def _no_pages(query: bytes) -> Sequence[bytes]:
    del query
    return ()
