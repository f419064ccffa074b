"""Time inside loraplex: monotonic integer nanoseconds. Wall time belongs to the edges."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where the control plane reads the time, so that a test can set it."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds; only differences mean something."""
        ...


class SystemClock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


class EventClock:
    """Stands still within one event of the engine, so that all that follows from it sees one time.

    What the control plane decides is then a function of its inputs and of the readings of `tick`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ns = clock.now_ns()

    def tick(self) -> int:
        """A new event begins: read the time."""
        self._now_ns = self._clock.now_ns()
        return self._now_ns

    def now_ns(self) -> int:
        return self._now_ns
