"""The end of standard input, which is the end of the process that started a server."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

_READ_BYTES = 4096


def end_of_input(then: Callable[[], None]) -> None:
    """Call a function on the running loop once standard input has ended. The input is dropped."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, _READ_BYTES):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(then)

    threading.Thread(target=wait, name="end-of-input", daemon=True).start()
