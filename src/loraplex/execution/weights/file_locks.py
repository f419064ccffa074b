"""Locks of files that are in use: who holds them, and exclusive access for a removal.

The kernel frees a lock when its process ends, however it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_LOCKS: Final = Path("/proc/locks")


def use(descriptor: int) -> None:
    """Mark an open file as used until the descriptor and its copies are closed.

    A file system without locks leaves it unmarked.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextlib.contextmanager
def unused(files: Iterable[Path]) -> Iterator[bool]:
    """Lock files for a removal. False if another process uses one of them."""
    with contextlib.ExitStack() as opened:
        is_unused = True
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_unused = False
        yield is_unused


def holders(files: Iterable[Path], locks: Path = _LOCKS) -> tuple[int, ...]:
    """Return the ids of the processes that use files, as far as the kernel reports them."""
    inodes = set()
    for file in files:
        with contextlib.suppress(OSError):
            inodes.add(str(file.stat().st_ino))
    try:
        lines = locks.read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    found = set()
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 3405 fd:00:1835083 0 EOF"; "->" marks a process that waits.
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] in inodes:
            found.add(int(words[4]))
    return tuple(sorted(pid for pid in found if pid > 0))
