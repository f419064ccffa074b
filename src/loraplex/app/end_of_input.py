"""A server that ends when whoever started it does: its standard input ends then."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

_READ_BYTES = 4096


def end_of_input(then: Callable[[], None]) -> None:
    """Call it, on the running loop, once standard input has ended; what comes there is dropped."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, _READ_BYTES):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(then)

    threading.Thread(target=wait, name="end-of-input", daemon=True).start()
