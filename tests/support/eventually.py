"""Waits for what another thread brings about."""

import time
from collections.abc import Callable

TIMEOUT_SECONDS = 120


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it holds before the time is over; returns as soon as it does."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True
