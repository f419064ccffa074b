"""Files out of the page cache, so that a start reads them from the disk: a cold start."""

import os
from pathlib import Path

_LARGE_BYTES = 1 << 20


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
