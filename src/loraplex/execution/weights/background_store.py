"""Thread of low priority that stores packed weights while they are served."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

_NICENESS: Final = 10
"""Steps go first, on the disk as well. Not 19: a thread that is hardly ever scheduled could keep
Python's lock, which steps need, for tens of milliseconds."""

Pause = Callable[[], None]
"""Function that a long work calls between its pieces. Raises StoreStoppedError once it is to end.
"""


class StoreStoppedError(Exception):
    """The process ends before the weights are stored."""


class BackgroundStore:
    """Work that runs until its end, or until it is closed."""

    def __init__(self, store: Callable[[Pause], object], held: contextlib.ExitStack) -> None:
        """held: what is closed at the end of the work."""
        self._stopping = threading.Event()
        # A daemon: a process that ends without `close` does not wait for the disk.
        self._thread = threading.Thread(
            target=self._run, args=(store, held), name="weights-store", daemon=True
        )
        self._thread.start()

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
        if self._stopping.is_set():
            raise StoreStoppedError
