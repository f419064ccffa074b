"""A server's process: started with its output in a log, found with its children, stopped for sure.

Reads /proc; where there is none (no Linux), a process has no known children and no known memory.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from loraplex.core.environment import child_environment
from loraplex.core.errors import ConfigError

_PROC = Path("/proc")
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
_LOG_TAIL_CHARACTERS = 2000


class ServerProcess:
    """A process of its own session, whose children end with it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        log: Path,
        variables: dict[str, str] | None = None,
        *,
        pipes: bool = False,
    ) -> "ServerProcess":
        """Run the command; what it prints is appended to `log`.

        variables: added to the environment. pipes: stdin and stdout are pipes for a protocol, and
        only stderr goes to the log. Raises ConfigError if it cannot be started.
        """
        pipe = asyncio.subprocess.PIPE if pipes else None
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=pipe or asyncio.subprocess.DEVNULL,
                    stdout=pipe or output,
                    stderr=output,
                    env=child_environment() | (variables or {}),
                    start_new_session=True,
                    limit=1 << 24,
                )
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None, "started without pipes"
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None, "started without pipes"
        return self._process.stdout

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait_until(self, is_ready: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Poll until it is ready. Raises ConfigError with the end of the log if the process ends
        first, or the time is over; then it is stopped.
        """
        end = time.monotonic() + seconds
        while not await is_ready():
            if not self.is_running:
                raise ConfigError(
                    f"the server ended with status {self._process.returncode} before it was ready: "
                    f"{self.log_tail()}"
                )
            if time.monotonic() > end:
                await self.stop()
                raise ConfigError(
                    f"the server was not ready within {seconds:g} seconds: {self.log_tail()}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    def log_tail(self) -> str:
        """The end of the log."""
        try:
            return self._log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:].strip()
        except OSError:
            return ""

    async def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its session. Idempotent."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def process_tree(roots: Iterable[int]) -> list[int]:
    """The processes and all that descend from them, as far as they are alive."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        # "pid (name) state parent ...", and a name may hold spaces and brackets.
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    waiting = list(dict.fromkeys(roots))
    while waiting:
        pid = waiting.pop()
        if pid not in found and (_PROC / str(pid)).exists():
            found.append(pid)
            waiting.extend(children.get(pid, ()))
    return sorted(found)


def resident_bytes(roots: Iterable[int]) -> int:
    """Memory of a process tree; a page that several processes share counts once in all.

    The sum of the proportional set sizes (Pss of /proc/PID/smaps_rollup, proc(5)): with it a
    mapped weight file counts as far as it is in memory, however many processes map it.
    """
    return sum(_proportional_bytes(pid) for pid in process_tree(roots))


def cpu_seconds(roots: Iterable[int]) -> float:
    """User and system time that the live processes of a tree have used so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(_cpu_ticks(pid) for pid in process_tree(roots)) / ticks


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "Pss":
                return int(value.split()[0]) * 1024
    return 0


def _cpu_ticks(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0
