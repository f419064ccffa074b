"""Log file written by a thread, so that a request never waits for a disk.

The file is opened again when it was moved or deleted, and on SIGHUP, as programs that rotate logs
expect.
"""

import logging
import os
import queue
import sys
import threading
from typing import BinaryIO

from loraplex.core.errors import ConfigError
from loraplex.frontends.metric_families import TableCollector, counter

logger = logging.getLogger(__name__)

STDOUT = "-"
MAX_WAITING_LINES = 10_000
_LOOK_SECONDS = 1.0
"""How often the file is looked for under its name."""
_CLOSE_SECONDS = 5.0
_MODE = 0o640


class LineWriter(TableCollector):
    """One open log. Counts the lines that the full queue or the disk refuses."""

    families = (
        counter(
            "loraplex_access_log_dropped_lines",
            "Lines of the access log that were not written: the disk is too slow, or full.",
            "num_dropped",
        ),
    )

    def __init__(self, path: str, max_waiting: int = MAX_WAITING_LINES) -> None:
        """Open a file to append to; `-` is standard output. Raises ConfigError."""
        self._path = path
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_waiting)
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._must_reopen = threading.Event()
        self._has_failed = False
        self._is_within_line = False
        """The file ends with a part of one: the disk took no more."""
        try:
            self._file = self._opened()
        except OSError as error:
            raise ConfigError(f"cannot write access_log {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Take a line with its line break. It never waits; any thread may call it."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._drop(1)

    def reopen(self) -> None:
        """Open the file of that name again, before the next line."""
        self._must_reopen.set()

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def num_waiting(self) -> int:
        return self._lines.qsize()

    def close(self) -> None:
        """Write what waits, as far as that is possible in a few seconds."""
        try:
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines, is_open = self._waiting()
            self._follow_name()
            if lines:
                self._write(lines)
        if self._path != STDOUT:
            self._file.close()

    def _waiting(self) -> tuple[list[bytes], bool]:
        """The lines that wait, after a while perhaps none; and whether more may come."""
        lines: list[bytes] = []
        try:
            line = self._lines.get(timeout=_LOOK_SECONDS)
            while line is not None:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return lines, True
        return lines, False

    def _write(self, lines: list[bytes]) -> None:
        data = (b"\n" if self._is_within_line else b"") + b"".join(lines)
        num_written = 0
        try:
            while num_written < len(data):  # a disk that is nearly full takes a part
                num_written += self._file.write(data[num_written:])
            self._file.flush()
            self._has_failed = self._is_within_line = False
        except (OSError, ValueError) as error:
            self._drop(data.count(b"\n", max(num_written, int(self._is_within_line))))
            if num_written:
                self._is_within_line = data[num_written - 1] != ord("\n")
            self._complain(error)

    def _follow_name(self) -> None:
        if self._path == STDOUT or not (self._must_reopen.is_set() or self._is_moved()):
            return
        self._must_reopen.clear()
        try:
            fresh = self._opened()
        except OSError as error:
            self._complain(error)
            return
        self._file.close()
        self._file = fresh
        self._is_within_line = False

    def _is_moved(self) -> bool:
        try:
            there, ours = os.stat(self._path), os.fstat(self._file.fileno())
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _opened(self) -> BinaryIO:
        if self._path == STDOUT:
            return sys.stdout.buffer
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        # Unbuffered: a write that failed must not come again with the next one.
        return os.fdopen(os.open(self._path, flags, _MODE), "wb", buffering=0)

    def _drop(self, num_lines: int) -> None:
        with self._lock:
            self._num_dropped += num_lines

    def _complain(self, error: Exception) -> None:
        """Once, until it works again."""
        if not self._has_failed:
            self._has_failed = True
            logger.error("the access log %s cannot be written: %s", self._path, error)
