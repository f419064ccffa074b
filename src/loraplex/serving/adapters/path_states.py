"""States of the paths that a scan has read: while they stay the same, so does what it found."""

import os
import time
from pathlib import Path
from typing import Final

_SETTLED_NS: Final = 2_000_000_000
"""Age from which a path's time shows every later change: file systems round times, some to two
seconds, so a younger one may stay the same when a second change follows."""

_State = tuple[int, int, int, int]
"""(inode, size, mtime_ns, ctime_ns); the last one changes with the permissions, too."""


class PathStates:
    """Paths with their states before they were read."""

    def __init__(self) -> None:
        self._started_ns = time.time_ns()
        self._states: dict[str, _State | None] = {}
        """None: there was nothing."""

    def note(self, path: str | Path) -> os.stat_result | None:
        """Return the status of a path; None if there is none. Call it before the path is read."""
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a name that no file can have
            status = None
        self._states.setdefault(str(path), None if status is None else _state(status))
        return status

    def are_unchanged(self) -> bool:
        """Whether no path has changed since it was noted; False also if that is not certain."""
        newest = max((state[2] for state in self._states.values() if state), default=0)
        if self._started_ns - newest < _SETTLED_NS:
            return False
        return all(_state_of(path) == state for path, state in self._states.items())


def _state_of(path: str) -> _State | None:
    try:
        return _state(os.stat(path))
    except (OSError, ValueError):
        return None


def _state(status: os.stat_result) -> _State:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
