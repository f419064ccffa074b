"""A folder of packed weights: which are there, who writes them, and which have to go.

Each set of weights is one file named by its key. Next to it is a lock, whose time is that of the
last use. Files that were read or written in full before are known by their identity on the disk, so
only a file that another program has touched is read in full again. The meaning of the weights is
unknown here.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex.adapters.seen_files import SeenFiles
from loraplex.core.byte_sizes import enough_bytes, readable_bytes
from loraplex.execution.weights.background_store import Pause
from loraplex.execution.weights.file_locks import unused
from loraplex.execution.weights.packed_file import (
    PackedFile,
    PackedFileError,
    packed_bytes,
    write_packed,
)
from loraplex.kernels.ops import LinearParts

logger = logging.getLogger(__name__)

_MIN_FREE_BYTES = 1 << 30
"""Stays free on the disk: a cache must not be what fills it."""
_CREATION_SECONDS = 10
_ABANDONED_SECONDS = 24 * 3600
_SEEN_AS = "packed weights"
_MIB = 1 << 20


class PackedCache:
    """Any number of processes may use one folder. What fails costs the cache, never the start."""

    def __init__(
        self, folder: Path, max_bytes: int, *, min_free_bytes: int = _MIN_FREE_BYTES
    ) -> None:
        """max_bytes: of all files together; those used longest ago go first."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self.seen = SeenFiles(folder)

    @classmethod
    def usable(cls, folder: Path, max_bytes: int) -> "PackedCache | None":
        """The cache in `folder`; None, and said, if nothing can be written there."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return cls(folder, max_bytes)
        except OSError as error:
            logger.warning(
                "no weights cache, so no start is faster than the first: cannot write to %s: %s",
                *(folder, error.strerror),
            )
            return None

    @contextlib.contextmanager
    def turn(self, key: str, model: str, *, leaves_lock: bool = True) -> Iterator[None]:
        """Be the only one that opens or stores `key`: who waits finds what the other stored.

        model: its folder, which the lock then contains, for people who clean up. leaves_lock: False
        for a key without a file of weights.
        Where a file system has no locks several may store the same; the last one's file stays.
        """
        with contextlib.ExitStack() as stack:
            path = self._path(key, "lock")
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                _wait_for(lock)
                if not leaves_lock:
                    stack.callback(path.unlink, missing_ok=True)
                os.ftruncate(lock, 0)
                os.pwrite(lock, model.encode(), 0)
            except OSError as error:
                logger.warning("no lock in the weights cache %s: %s", self.folder, error.strerror)
            yield

    def has(self, prefix: str) -> bool:
        """Whether there are weights of a key with this prefix."""
        return any(self.folder.glob(f"{prefix}*.weights"))

    def open(self, key: str) -> PackedFile | None:
        """The weights of `key`, mapped; None if they have to be made (anew)."""
        path = self._path(key, "weights")
        try:
            file = PackedFile(path, key)
            self.check_once(file)
        except FileNotFoundError:
            return None
        except (OSError, PackedFileError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            logger.warning("%s is not used but made again: %s", path, reason)
            return None
        return file

    def store(
        self, key: str, entries: Sequence[LinearParts], summary: str, pause: Pause = lambda: None
    ) -> None:
        """Write the weights of `key`; if that cannot be, the log has the reason."""
        path = self._path(key, "weights")
        needed = packed_bytes(entries)
        started = time.monotonic()
        try:
            self._free_space(path, needed)
            write_packed(path, key, entries, summary, pause)
            self._remember(PackedFile(path, key))
        except (OSError, PackedFileError, _TooSmallError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            logger.warning("the packed weights are not kept for the next start: %s", reason)
        else:
            seconds = time.monotonic() - started
            mib = needed // _MIB
            logger.info("packed weights: %d MiB kept in %s (%.1f s)", mib, path, seconds)

    def check_once(self, file: PackedFile) -> None:
        """Raises PackedFileError. A file that is the very one known as good is not read.

        It need not be one of this cache.
        """
        if self.seen.find((file.identity,), _SEEN_AS) != file.payload_digest:
            file.check_payload()
            self._remember(file)

    def _remember(self, file: PackedFile) -> None:
        with contextlib.suppress(OSError):  # it is then read in full at the next start
            self.seen.remember((file.identity,), file.payload_digest, _SEEN_AS)

    def _free_space(self, path: Path, needed: int) -> None:
        """Raises _TooSmallError, before anything is deleted, if all removable files are too few."""
        if needed > self._max_bytes:
            raise _TooSmallError(
                f"they take {readable_bytes(needed)}, and weights_cache_bytes is "
                f"{readable_bytes(self._max_bytes)}: raise it to {enough_bytes(needed)}"
            )
        self._delete_abandoned()
        others = [(last_use, size, p) for last_use, size, p in self._files() if p != path]
        used = sum(size for _, size, _ in others)
        free = shutil.disk_usage(self.folder).free
        if free + used < needed + self._min_free_bytes:
            raise _TooSmallError(
                f"{self.folder} has {readable_bytes(free)} free, and they need "
                f"{readable_bytes(needed + self._min_free_bytes)}: free space there, or set "
                "weights_cache_dir to another disk"
            )
        for _, size, other in sorted(others):
            if used + needed <= self._max_bytes and free >= needed + self._min_free_bytes:
                return
            logger.info("%s goes: it was used longest ago", other)
            for file in (other, other.with_suffix(".lock")):
                file.unlink(missing_ok=True)
            used, free = used - size, free + size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, bytes and path of every file."""
        for path in self.folder.glob("*.weights"):
            with contextlib.suppress(OSError):  # deleted meanwhile, or a link that leads nowhere
                status = path.stat()
                last_use = status.st_mtime
                with contextlib.suppress(FileNotFoundError):
                    last_use = path.with_suffix(".lock").stat().st_mtime
                yield last_use, status.st_size, path

    def _delete_abandoned(self) -> None:
        """Delete what killed writers left."""
        for path in self.folder.glob(".*.weights.*.tmp"):
            with contextlib.suppress(OSError):
                if _is_abandoned(path):
                    path.unlink()

    def _path(self, key: str, kind: str) -> Path:
        return self.folder / f"{key}.{kind}"


def _is_abandoned(unfinished: Path) -> bool:
    """Return whether the writer of a file has ended. Raises OSError if the file is gone."""
    age = time.time() - unfinished.stat().st_mtime
    try:
        with unused([unfinished]) as is_unused:
            # A writer locks its file just after it has created it.
            return is_unused and age > _CREATION_SECONDS
    except OSError:  # the file system has no locks
        return age > _ABANDONED_SECONDS


class _TooSmallError(Exception):
    """The message names what is too small."""


def _wait_for(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("another process packs or writes the same weights: waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
