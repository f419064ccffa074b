"""Advisory locks on files of a state directory, which the kernel frees when a process ends.

One process may own the database; any number may use the canonical adapter files. The lock does not
know what either holds.
"""

import fcntl
import os
import shlex
import time
from pathlib import Path

from loraplex.adapters.durable_files import make_folder
from loraplex.core.errors import ConfigError

_OWNER_NAME = "adapters.lock"
_USERS_NAME = "files.lock"
_MAX_PID_BYTES = 32
_PATIENCE_SECONDS = 1.0
_POLL_SECONDS = 0.02


def lock_files(state_dir: Path) -> tuple[Path, Path]:
    """Return the files of a state directory that are locked while a process uses it."""
    return state_dir / _OWNER_NAME, state_dir / _USERS_NAME


class StateLock:
    """Lock on one file, held until close() or the end of the process.

    The descriptor is not inherited: no child keeps a dead server's lock.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @classmethod
    def own(cls, state_dir: Path) -> "StateLock":
        """Become the one server of a state directory. Raises ConfigError with the other's id."""
        path = state_dir / _OWNER_NAME
        lock = cls._opened(path)
        if lock._exclusive_soon():
            os.ftruncate(lock._descriptor, 0)
            os.pwrite(lock._descriptor, f"{os.getpid()}\n".encode(), 0)
            return lock
        other = os.pread(lock._descriptor, _MAX_PID_BYTES, 0).decode(errors="replace").strip()
        lock.close()
        raise ConfigError(
            f"the state directory {state_dir} is in use by another server, process "
            f"{other or 'unknown'} ({path} is locked); stop it, or give this one a state of "
            f"its own: --state-dir {shlex.quote(f'{state_dir}-2')}"
        )

    @classmethod
    def use_files(cls, state_dir: Path) -> "StateLock":
        """Keep all canonical adapter files of a state directory from being collected by any owner.

        Waits for a collection in progress. Raises ConfigError if the folder is unusable.
        """
        lock = cls._opened(state_dir / _USERS_NAME)
        lock.share()
        os.utime(lock._descriptor)  # `loraplex cache` reads the time of the last use
        return lock

    @classmethod
    def _opened(cls, path: Path) -> "StateLock":
        try:
            make_folder(path.parent)
            return cls(path)
        except OSError as error:
            raise ConfigError(
                f"cannot use the state directory {path.parent}: {error.strerror}; "
                "set --state-dir to a folder that can be written"
            ) from error

    def share(self) -> None:
        """Change to a shared lock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Change to an exclusive lock. False if another holds it; then the lock may be lost."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _exclusive_soon(self) -> bool:
        """Return try_exclusive's result, after a wait for a server that was killed a moment ago.

        If it was just starting a process, that process has the lock until it runs its program.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.try_exclusive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def close(self) -> None:
        os.close(self._descriptor)
