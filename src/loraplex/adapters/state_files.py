"""Who may use a state directory, and its canonical adapter files: find them, delete unneeded ones.

Advisory locks on files, which the kernel frees when a process ends: one process may own the
database, and any number may use the canonical adapter files. The path of such a file is made from a
digest only. Versions and names are not known here.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loraplex.adapters.durable_files import make_folder
from loraplex.core.errors import ConfigError

_OWNER_NAME = "adapters.lock"
_USERS_NAME = "files.lock"
_MAX_PID_BYTES = 32
_PATIENCE_SECONDS = 1.0
_POLL_SECONDS = 0.02
_CANONICAL_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{64}\.safetensors\.[0-9]+\.tmp")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def canonical_path(state_dir: Path, adapter_digest: str) -> Path:
    """Return the path of an adapter in the state directory: its name is its content's digest."""
    return state_dir / "adapters" / adapter_digest[:2] / f"{adapter_digest}.safetensors"


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


@dataclasses.dataclass(frozen=True, slots=True)
class Collected:
    """Result of a garbage collection."""

    num_files: int = 0
    num_bytes: int = 0
    is_refused: bool = False
    """Whether nothing was deleted because another process uses the files."""


class CanonicalFiles:
    """Access to the files, with a shared lock so that no other process deletes them."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._share = StateLock.use_files(state_dir)

    def path(self, digest: str) -> str:
        assert _DIGEST.fullmatch(digest), digest
        return str(canonical_path(self._state_dir, digest))

    def has(self, digest: str) -> bool:
        return os.path.isfile(self.path(digest))

    def collect(self, may_go: Callable[[str], bool], min_age_seconds: float) -> Collected:
        """Delete the files whose digest may go, and incomplete files of killed writers.

        A file that was written within min_age_seconds stays: its version may be about to be
        registered. Deletes nothing while another process uses the files.
        """
        if not self._share.try_exclusive():
            self._share.share()
            return Collected(is_refused=True)
        try:
            return self._delete(may_go, time.time() - min_age_seconds)
        finally:
            self._share.share()

    def close(self) -> None:
        self._share.close()

    def _delete(self, may_go: Callable[[str], bool], newest: float) -> Collected:
        num_files = num_bytes = 0
        for entry in canonical_entries(self._state_dir):
            normal = _CANONICAL_NAME.fullmatch(entry.name)
            is_ours = may_go(normal[1]) if normal else _TEMPORARY_NAME.fullmatch(entry.name)
            # The staging worker may rename its files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if is_ours and status.st_mtime <= newest:
                    os.unlink(entry.path)
                    num_files += 1
                    num_bytes += status.st_size
        return Collected(num_files, num_bytes)


def canonical_entries(state_dir: Path) -> Iterator[os.DirEntry[str]]:
    """Yield each regular file of the folders of canonical files; links are not followed."""
    root = state_dir / "adapters"
    if not root.is_dir():
        return
    with os.scandir(root) as folders:
        for folder in folders:
            if folder.is_dir(follow_symlinks=False):
                # It may have been deleted since it was listed.
                with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
                    yield from (f for f in files if f.is_file(follow_symlinks=False))
