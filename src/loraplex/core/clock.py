"""Time inside loraplex: monotonic integer nanoseconds. Wall time belongs to the edges."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for the control plane, so that a test can set it."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds; only differences have a meaning."""
        ...


class SystemClock:
    now_ns = staticmethod(time.monotonic_ns)


class EventClock:
    """Clock that stands still within one event of the engine.

    So the decisions of the control plane are a function of its inputs and of the readings of
    `tick`, and can be replayed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ns = clock.now_ns()

    def tick(self) -> int:
        """Begin a new event: read the time."""
        self._now_ns = self._clock.now_ns()
        return self._now_ns

    def now_ns(self) -> int:
        return self._now_ns
