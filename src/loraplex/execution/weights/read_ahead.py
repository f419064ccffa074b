"""Reads of a file in its order, ahead of threads that read its mapping.

A page that is touched before it is in memory stops its thread, and the system then reads around it
in small pages. Reads in order bring large pages, and keep the disk at work meanwhile.
"""

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

_PIECE_BYTES: Final = 4 << 20
_AHEAD_BYTES: Final = 512 << 20
"""Bytes that may be read before they are wanted: memory that is short would lose more of them."""


class ReadAhead:
    """Thread that brings a file into the system's cache. What fails is left to those who look."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._file = path.open("rb", buffering=0)
        self._changed = threading.Condition()
        self._end = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="weights-read", daemon=True)
        self._thread.start()

    def want(self, end: int) -> None:
        """Note that the file's bytes before `end` are read now."""
        with self._changed:
            self._end = max(self._end, end + _AHEAD_BYTES)
            self._changed.notify()

    def close(self) -> None:
        """Stop after the present piece."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        descriptor, piece = self._file.fileno(), bytearray(_PIECE_BYTES)
        position, num_read = 0, 1
        with contextlib.suppress(OSError):
            while num_read:
                with self._changed:
                    while position >= self._end and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed:
                        return
                if not _is_cached(descriptor, position):
                    num_read = os.preadv(descriptor, [piece], position)
                position += _PIECE_BYTES


def _is_cached(descriptor: int, position: int) -> bool:
    """Return whether a byte is in memory: its piece is then as well, as a rule."""
    try:
        return os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT) > 0
    except (AttributeError, OSError):  # it is not, or the system does not report it
        return False
