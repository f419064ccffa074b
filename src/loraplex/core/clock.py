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
