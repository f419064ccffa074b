"""A server's process: started as its user would, found with its children, stopped for sure.

The measured programs get the environment of the person who measures, and nothing of ours: the
setting with which our engine's threads sleep (OMP_WAIT_POLICY=PASSIVE) makes other programs that
use OpenMP two to six times slower. Our own server sets what it needs by itself.

Reads /proc; where there is none (no Linux), a process has no known children and no known memory.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from loraplex.core.environment import ENVIRONMENT_PREFIX
from loraplex.core.errors import ConfigError

_PROC = Path("/proc")
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
_LOG_TAIL_CHARACTERS = 2000
_THREAD_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_PRELOAD")
"""Beginnings of the names of variables that change how fast a program computes."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How a program was started."""

    command: tuple[str, ...]
    added: dict[str, str] = {}
    """Variables that the comparison added to the environment of the person who measures."""
    inherited: dict[str, str] = {}
    """Variables of that environment that change how fast a program computes."""


def user_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the person who measures, with variables added.

    LORAPLEX_* variables are left out: what our own server runs with is in its flags, and a key for
    it belongs to no other program.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    return inherited | dict(added)


class ServerProcess:
    """A process of its own session, whose children end with it."""

    _started: ClassVar["set[ServerProcess]"] = set()
    """Those that are not stopped yet."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, launch: Launch) -> None:
        self.launch = launch
        self._process = process
        self._log = log
        self._started.add(self)

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

        variables: added to the user's environment. pipes: stdin and stdout are pipes for a
        protocol, and only stderr goes to the log. Raises ConfigError if it cannot be started.
        """
        pipe = asyncio.subprocess.PIPE if pipes else None
        added = variables or {}
        environment = user_environment(added)
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=pipe or asyncio.subprocess.DEVNULL,
                    stdout=pipe or output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                    limit=1 << 24,
                )
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
        inherited = thread_variables(environment)
        for name in added:
            inherited.pop(name, None)
        launch = Launch(command=tuple(command), added=dict(added), inherited=inherited)
        return cls(process, log, launch)

    @classmethod
    async def stop_all(cls) -> None:
        """Stop all that are not stopped, all at once."""
        await asyncio.gather(*(process.stop() for process in [*cls._started]))

    @classmethod
    def kill_all(cls) -> None:
        """SIGKILL to all that are not stopped, so that no `stop` waits any longer."""
        for process in cls._started:
            _kill(process._tree())

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

    async def wait(self) -> int:
        """Wait until it ends by itself; gives its exit status."""
        return await self._process.wait()

    async def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its session and of its
        descendants, which may have sessions of their own. Idempotent.
        """
        # Once it has ended, its descendants are no longer found through it.
        tree = self._tree()
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        _kill(tree | self._tree())
        await self._process.wait()
        self._started.discard(self)

    def _tree(self) -> dict[int, int]:
        """The start of each process below this one, by id; empty if it has ended, because then its
        id may be that of another process."""
        return _start_ticks(process_tree([self.pid] if self.is_running else []))


def thread_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how fast a program computes: those of OpenMP and others."""
    return {k: v for k, v in sorted(environment.items()) if k.startswith(_THREAD_VARIABLES)}


def variables_of_children(roots: Iterable[int]) -> dict[str, str]:
    """Return the thread variables that the processes' descendants started with (proc(5),
    /proc/PID/environ), where a program sets them for its own children.
    """
    found: dict[str, str] = {}
    for pid in set(process_tree(roots)) - set(roots):
        with contextlib.suppress(OSError):
            lines = (_PROC / str(pid) / "environ").read_text(errors="replace").split("\0")
            found |= thread_variables(dict(_pairs(lines)))
    return found


def _pairs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, equals, value = line.partition("=")
        if equals:
            yield name, value


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


def _start_ticks(pids: Iterable[int]) -> dict[int, int]:
    """When each process started (proc(5), field 22): a number that is given out again differs."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2]
            found[pid] = int(fields.split()[19])
    return found


def _kill(processes: Mapping[int, int]) -> None:
    """SIGKILL to those processes, by id and start, that still run."""
    for pid, start in _start_ticks(processes).items():
        if start == processes[pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def resident_bytes(roots: Iterable[int]) -> int:
    """Memory of a process tree; a page that several processes share counts once in all.

    The sum of the proportional set sizes (Pss of /proc/PID/smaps_rollup, proc(5)): with it a
    mapped weight file counts as far as it is in memory, however many processes map it.
    """
    return sum(_proportional_bytes(pid, "Pss") for pid in process_tree(roots))


def file_bytes(roots: Iterable[int]) -> int:
    """Share of resident_bytes that is mapped from files: the system can take it back, and a second
    process that maps the same files shares it.
    """
    return sum(_proportional_bytes(pid, "Pss_File") for pid in process_tree(roots))


def cpu_seconds(roots: Iterable[int]) -> float:
    """User and system time that the live processes of a tree have used so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(_cpu_ticks(pid) for pid in process_tree(roots)) / ticks


def _proportional_bytes(pid: int, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == field:
                return int(value.split()[0]) * 1024
    return 0


def _cpu_ticks(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0
