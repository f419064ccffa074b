"""Families of Prometheus metrics as rows of a table, and the text of those of other systems.

Counters of other systems have no `_total`, which prometheus_client adds to every counter. So these
are families of no type, which the text format then calls counters; OpenMetrics, which knows no such
counters, leaves them without a type. Numbers and labels of Triton's families are those of
prometheus-cpp: integers have no fraction, and `le` and `quantile` are the last labels.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_SAMPLE = re.compile(rb"^((?:nv_|vllm:)[^{ ]+)\{(.*)\} (\S+)$", re.MULTILINE)
_LAST_LABEL = re.compile(rb'(?:^|,)(le|quantile)="([^"]*)"')
_UNTYPED = re.compile(rb"^(# TYPE \S+) untyped$", re.MULTILINE)

Source = str | Mapping[str, "Source"] | Callable[[Any], Any]
"""Path of attributes, function, or sources by the value of the family's label."""
Subjects = Sequence[tuple[tuple[str, ...], Any]]
"""(values of the first labels, object that is measured) of each row of series."""


class Family(NamedTuple):
    """One family of metrics."""

    name: str
    text: str
    """Its help."""
    source: Source
    """What a subject has: a value, None for no series, or values by label. A label is a text, or a
    tuple of texts; a value is a number, or a tuple of what the type's `add_metric` takes."""
    labels: tuple[str, ...] = ()
    """Labels after those of the subjects."""
    type: Callable[..., Metric] = GaugeMetricFamily


counter = functools.partial(Family, type=CounterMetricFamily)
histogram = functools.partial(Family, type=HistogramMetricFamily)


def collected(
    families: Iterable[Family], subjects: Subjects, labels: tuple[str, ...] = ()
) -> Iterator[Metric]:
    """Yield the families with the series of all subjects, whose labels come first."""
    for family in families:
        metric: Any = family.type(family.name, family.text, labels=(*labels, *family.labels))
        for first, subject in subjects:
            values = _read(family.source, subject)
            for label, value in (values if isinstance(values, Mapping) else {(): values}).items():
                if value is not None:
                    further = (label,) if isinstance(label, str) else label
                    arguments = value if isinstance(value, tuple) else (value,)
                    metric.add_metric((*first, *further), *arguments)
        yield metric


def _read(source: Source, subject: Any) -> Any:
    if isinstance(source, str):
        return operator.attrgetter(source)(subject)
    if isinstance(source, Mapping):
        return {label: _read(each, subject) for label, each in source.items()}
    return source(subject)


class TableCollector(Collector):
    """Collector of families whose one subject it is. Registering it reads nothing."""

    families: ClassVar[Sequence[Family]] = ()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what is measured may not have started."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return collected(self.families, [((), self)])


class FunctionCollector(TableCollector):
    """Collector of what a function returns."""

    def __init__(self, function: Callable[[], Iterable[Metric]]) -> None:
        self._function = function

    def collect(self) -> Iterable[Metric]:
        return self._function()


class ExactCounter(Metric):
    """A counter whose name stays as it is."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        super().__init__(name, text, "unknown")
        self._labels = labels

    def add_metric(self, labels: Sequence[str], value: float) -> None:
        self.add_sample(self.name, dict(zip(self._labels, labels, strict=True)), value)


def as_originals_write(text: bytes) -> bytes:
    """Return Prometheus' text format with the families of other systems as those write them."""
    return _SAMPLE.sub(_rewritten, _UNTYPED.sub(rb"\1 counter", text))


def _rewritten(sample: re.Match[bytes]) -> bytes:
    name, labels, value = sample.groups()
    last = _LAST_LABEL.search(labels)
    if last is not None:
        others = (labels[: last.start()] + labels[last.end() :]).removeprefix(b",")
        labels = b'%s,%s="%s"' % (others, last[1], _number(last[2]))
    return b"%s{%s} %s" % (name, labels, _number(value))


def _number(written: bytes) -> bytes:
    number = float(written)
    if math.isnan(number):
        return b"Nan"
    if math.isinf(number):
        return b"+Inf" if number > 0 else b"-Inf"
    return f"{number:.16g}".encode()
