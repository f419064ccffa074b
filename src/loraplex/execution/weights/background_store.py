"""Thread of low priority that stores packed weights while they are served."""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

_NICENESS: Final = 10
"""Steps go first, on the disk as well. Not 19: a thread that is hardly ever scheduled could keep
Python's lock, which steps need, for tens of milliseconds."""

_IDLE_SECONDS: Final = 5.0
"""No step has begun for so long: no request waits. A long prompt's steps take seconds."""

_RESTS: Final = 8
"""While steps run, the work rests so many times as long as its newest piece computed: it takes
bandwidth and a core from them, and all threads of a step wait for the slowest. While it waits for
a core or the disk it takes neither."""

Pause = Callable[[], None]
"""Function that a long work calls between its pieces. Raises StoreStoppedError once it is to end.
"""


class StoreStoppedError(Exception):
    """The process ends before the weights are stored."""


class BackgroundStore:
    """Work that runs until its end, or until it is closed."""

    def __init__(self, store: Callable[[Pause], object], held: contextlib.ExitStack) -> None:
        """held: what is closed at the end of the work."""
        self._newest_step = -math.inf
        self._computed = threading.local()
        self._stopping = threading.Event()
        # A daemon: a process that ends without `close` does not wait for the disk.
        self._thread = threading.Thread(
            target=self._run, args=(store, held), name="weights-store", daemon=True
        )
        self._thread.start()

    def note_step(self) -> None:
        """Note that a step runs now."""
        self._newest_step = time.monotonic()

    def wait(self) -> None:
        """Wait for the end of the work."""
        self._thread.join()

    def close(self) -> None:
        """Stop at the end of the present piece, and wait for that."""
        self._stopping.set()
        self._thread.join()

    def _run(self, store: Callable[[Pause], object], held: contextlib.ExitStack) -> None:
        with held:
            # Where threads have no priority of their own the call fails.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            try:
                store(self._pause)
            except StoreStoppedError:
                logger.info(
                    "the packed weights are not kept: the server ends before they are written"
                )

    def _pause(self) -> None:
        """Rest after a piece of the calling thread: files are hashed by several."""
        computed = time.thread_time()
        piece_seconds = computed - getattr(self._computed, "seconds", 0.0)
        self._computed.seconds = computed
        if self._stopping.wait(rest_after(piece_seconds, time.monotonic() - self._newest_step)):
            raise StoreStoppedError


def rest_after(piece_seconds: float, idle_seconds: float) -> float:
    """Seconds to rest after a piece of work that took `piece_seconds` of a core.

    idle_seconds: time since the newest step began.
    """
    if idle_seconds >= _IDLE_SECONDS:
        return 0
    return min(_RESTS * piece_seconds, _IDLE_SECONDS)
