"""Counters of other systems, whose names have no `_total`.

prometheus_client adds that to every counter. So these are families of no type, which the text
format of Prometheus then calls counters; OpenMetrics, which knows no such counters, leaves them
without a type.
"""

import re

from prometheus_client.core import Metric

_UNTYPED = re.compile(rb"^(# TYPE \S+) untyped$", re.MULTILINE)


class ExactCounter(Metric):
    """A counter whose name stays as it is."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text, "unknown")

    def add(self, labels: dict[str, str], value: float) -> None:
        """One series."""
        self.add_sample(self.name, labels, value)


def with_counters(text: bytes) -> bytes:
    """Give the metrics without a type, which are ExactCounters, the type counter."""
    return _UNTYPED.sub(rb"\1 counter", text)
