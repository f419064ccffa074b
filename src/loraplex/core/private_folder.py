"""Folders of this process in the temporary directory or in another, which no killed process leaves.

Each has a locked file. The kernel frees the lock when the process ends, however it ends. The next
process that creates a folder deletes those whose lock is free.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "loraplex-"
_LOCK = ".owner"
_NEW_LOCK = ".owner-new"


class PrivateFolder:
    """Folder with mode 0700: no other user may enter it."""

    def __init__(self, parent: Path | None = None) -> None:
        """Create the folder. parent: an existing folder; None: the temporary directory."""
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        new_lock = os.path.join(self.path, _NEW_LOCK)
        self._lock = os.open(new_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Another process must not see it under its name before it is locked.
        os.rename(new_lock, os.path.join(self.path, _LOCK))

    def remove(self) -> None:
        """Delete the folder and all that is in it. A second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    """Delete the folders of processes of this user that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process deletes it at the same time
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
