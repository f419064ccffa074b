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
