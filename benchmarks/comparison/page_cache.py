"""Files that starts read: when a first start has written them, and out of the page cache again."""

import asyncio
import os
import time
from pathlib import Path

_LARGE_BYTES = 1 << 20
_QUIET_SECONDS = 5.0
_MAX_WAIT_SECONDS = 600.0


async def wait_for_files(folder: Path) -> None:
    """Return when no file below a folder has changed for some seconds.

    A server may write files for its next start after it is ready, as ours does with packed weights.
    """
    end = time.monotonic() + _MAX_WAIT_SECONDS
    before = None
    while (now := await asyncio.to_thread(_states, folder)) != before and time.monotonic() < end:
        before = now
        await asyncio.sleep(_QUIET_SECONDS)


def _states(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return sizes and times of change; a file that goes meanwhile is left out."""
    found = {}
    for path in folder.rglob("*"):
        try:
            state = path.stat()
        except FileNotFoundError:
            continue
        found[path] = (state.st_size, state.st_mtime_ns)
    return found


def drop_from_page_cache(folder: Path) -> None:
    """Let the kernel forget the pages of all large files below a folder (posix_fadvise(2)).

    Pages that a process maps stay. Does nothing where the system has no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size >= _LARGE_BYTES:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)  # pages that are not written yet would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
