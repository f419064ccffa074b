"""Files and folders that survive a loss of power, and space for changes that free more of it."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from loraplex.core.errors import SHORTAGES, StorageFullError, StorageUnavailableError

FileIdentity = tuple[int, int]
"""(device, inode)"""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SECONDS = 60.0


def storage_full(reason: str) -> StorageFullError:
    return StorageFullError(
        f"the disk of the server's state directory is full ({reason}): nothing was stored. Unload "
        "adapters that are not needed, or free space on that disk, and try again",
        retry_after_seconds=_RETRY_SECONDS,
    )


def storage_unavailable(reason: str) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"the server's state directory cannot be used ({reason}): nothing was changed there. "
        "Adapters that are loaded are served; the operator has to repair the directory",
        retry_after_seconds=_RETRY_SECONDS,
    )


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Raise StorageFullError or StorageUnavailableError in place of an OSError.

    Nothing but files of the state directory may be used inside.
    """
    with reporting_full_disk():
        try:
            yield
        except OSError as error:
            if error.errno in _FULL or error.errno in SHORTAGES:
                raise
            raise storage_unavailable(error.strerror or str(error)) from error


@contextlib.contextmanager
def reporting_full_disk() -> Iterator[None]:
    """Raise StorageFullError in place of an OSError for a full disk or an exceeded quota."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise storage_full(os.strerror(error.errno)) from error
        raise


def make_folder(folder: Path) -> None:
    """Create a folder and those above it durably: each name is on the disk, not only in memory."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file durably: it is complete or absent. Creates the folder."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def identity_of(path: Path) -> FileIdentity | None:
    """Return which file a path names now; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Reserve:
    """File whose space is given up for the time of a removal: a full disk must not prevent it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self._fill()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        with contextlib.suppress(OSError):  # without a reserve the removal is tried all the same
            os.truncate(self._path, 0)
        try:
            yield
        finally:
            self._fill()

    def _fill(self) -> None:
        """Allocate the space; on a full disk as much as there is, and the rest another time."""
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, self._num_bytes)
