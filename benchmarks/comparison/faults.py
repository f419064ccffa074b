"""Faults that a running server must survive: its processes end or stop, its disk is full.

Needs Linux: processes are found in /proc, and a small disk is a tmpfs.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loraplex.core.stopped_process import state_of

_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_SECONDS: Final = 0.05
_CHUNK_BYTES: Final = 1 << 20
KINDS_OF_PROCESS: Final = ("engine", "staging_worker", "grammar_worker", "chat_worker")


def adopt_orphans() -> None:
    """Become the parent of every process whose parent ends below this one (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def children(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the children of a process that still run: pid and command."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            if state_of(child) not in (None, "Z"):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{child}/cmdline").read_bytes()
                    yield child, command.decode(errors="replace").replace("\0", " ")


def processes_of(server_pid: int, kind: str) -> list[int]:
    """Return the processes of a server of one of KINDS_OF_PROCESS."""
    return [pid for pid, command in children(server_pid) if kind in command]


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap_orphans(but: int) -> None:
    """Collect adopted children that have ended; `but` is the server, which its owner collects."""
    for task in Path("/proc/self/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            if child != but and state_of(child) == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)


async def seconds_until_gone(pid: int, limit: float) -> float | None:
    """Wait until a process has ended; None if it has not within `limit` seconds."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while state_of(pid) not in (None, "Z"):
        if loop.time() - start > limit:
            return None
        await asyncio.sleep(_POLL_SECONDS)
    return loop.time() - start


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Mount a disk of num_bytes at folder, which is made; False if this system does not let us."""
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder))
    try:
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(("umount", str(folder)), check=True)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Fill the disk that folder is on until the context ends."""
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            size = _CHUNK_BYTES
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
        yield
    finally:
        ballast.unlink(missing_ok=True)
