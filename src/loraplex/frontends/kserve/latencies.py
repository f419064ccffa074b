"""Durations of a model's newest requests, for quantiles over a sliding window, and a histogram."""

import bisect
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client.utils import floatToGoString

WINDOW_SECONDS = 60.0
"""Window of a summary: the default of Triton's library, prometheus-cpp."""
MAX_VALUES = 10_000
"""Values per window: the newest ones are kept."""
_written: Callable[[float], str] = floatToGoString
"""How prometheus_client writes a bound."""
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)


class RecentValues:
    """Values of the last WINDOW_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float) -> None:
        self._values.append((self._clock(), value))

    def quantiles(self, quantiles: Sequence[float]) -> list[float]:
        """The nearest ranks; NaN where nothing is left of the window."""
        oldest = self._clock() - WINDOW_SECONDS
        while self._values and self._values[0][0] < oldest:
            self._values.popleft()
        ordered = sorted(value for _, value in self._values)
        if not ordered:
            return [math.nan] * len(quantiles)
        return [ordered[math.ceil(quantile * len(ordered)) - 1] for quantile in quantiles]


class Histogram:
    """How many values were at most each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """The same value `count` times."""
        if count > 0:
            self._counts[bisect.bisect_left(self.bounds, value)] += count
            self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, values up to it), with +Inf in the end."""
        totals = itertools.accumulate(self._counts)
        return [
            (_written(bound), float(total))
            for bound, total in zip((*self.bounds, math.inf), totals, strict=True)
        ]


@dataclasses.dataclass(slots=True)
class Latencies:
    """Microseconds of one model's requests that succeeded; the first response in milliseconds."""

    request: RecentValues = dataclasses.field(default_factory=RecentValues)
    queue: RecentValues = dataclasses.field(default_factory=RecentValues)
    compute_input: RecentValues = dataclasses.field(default_factory=RecentValues)
    compute_infer: RecentValues = dataclasses.field(default_factory=RecentValues)
    compute_output: RecentValues = dataclasses.field(default_factory=RecentValues)
    first_response: Histogram = dataclasses.field(
        default_factory=lambda: Histogram(FIRST_RESPONSE_BUCKETS_MS)
    )

    @classmethod
    def of(cls, first_response_buckets: Sequence[float]) -> "Latencies":
        return cls(first_response=Histogram(first_response_buckets))

    def add(self, total: int, queue: int, compute: tuple[int, int, int]) -> None:
        """Add one request, in nanoseconds; compute: input, inference, output."""
        values = zip(self._windows, (total, queue, *compute), strict=True)
        for window, ns in values:
            window.add(ns // 1000)

    @property
    def _windows(self) -> tuple[RecentValues, ...]:
        computing = (self.compute_input, self.compute_infer, self.compute_output)
        return (self.request, self.queue, *computing)
