"""Families of other systems in Prometheus' text format, written as those systems write them.

Counters have no `_total`, which prometheus_client adds to every counter. So these are families of
no type, which the text format then calls counters; OpenMetrics, which knows no such counters,
leaves them without a type. Numbers and labels of Triton's families are those of prometheus-cpp:
integers have no fraction, and `le` and `quantile` are the last labels.
"""

import math
import re

from prometheus_client.core import Metric

_SAMPLE = re.compile(rb"^((?:nv_|vllm:)[^{ ]+)\{(.*)\} (\S+)$", re.MULTILINE)
_LAST_LABEL = re.compile(rb'(?:^|,)(le|quantile)="([^"]*)"')
_UNTYPED = re.compile(rb"^(# TYPE \S+) untyped$", re.MULTILINE)


class ExactCounter(Metric):
    """A counter whose name stays as it is."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text, "unknown")

    def add(self, labels: dict[str, str], value: float) -> None:
        """One series."""
        self.add_sample(self.name, labels, value)


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
