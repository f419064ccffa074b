"""How processes ended, and detection of stopped ones: they are alive, and neither work nor end.

A worker that crashes closes its pipes, and one that takes too long exceeds its limits. One that a
signal stopped does neither, so its client looks at it while it waits.
"""

import asyncio
import dataclasses
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

LOOK_SECONDS: Final = 0.5
"""Interval at which clients look at a worker that has not replied yet."""
_NUM_LOOKS: Final = 2
"""Successive looks that must find it stopped: one that continues at once is left alone."""


class ProcessStopped(Exception):
    """A process was stopped by a signal while a reply was awaited. It has to be killed."""


@dataclasses.dataclass(slots=True)
class StopWatch:
    """Watch of one process during one call."""

    _pid: int
    _num_stopped: int = 0

    def look(self) -> None:
        """Raise ProcessStopped if this look and those before it found the process stopped.

        To be called every LOOK_SECONDS.
        """
        self._num_stopped = self._num_stopped + 1 if is_stopped(self._pid) else 0
        if self._num_stopped >= _NUM_LOOKS:
            raise ProcessStopped(f"process {self._pid} is stopped")


def is_stopped(pid: int) -> bool:
    """Return whether a signal stopped a process. Always False without /proc."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str | None:
    """Return the letter of a process's state, see proc(5); None if it is gone, or without /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name before it is in parentheses, and may contain any character.
    return status.rpartition(b")")[2].split(None, 1)[0].decode()


async def while_running(pid: int, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work that waits for a process.

    Raises ProcessStopped, and cancels the work, if the process is stopped meanwhile.
    """
    watch, task = StopWatch(pid), asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            watch.look()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def how_it_ended(status: int | None) -> str:
    """How a process ended, from its exit status; None: it did not, though it was killed."""
    if status is None:
        return "was given up"
    if status >= 0:
        return f"ended with status {status}"
    names = {int(number): number.name for number in signal.Signals}
    hint = "; a system short of memory does that, and logs it" if -status == signal.SIGKILL else ""
    return f"was killed by {names.get(-status, f'signal {-status}')}{hint}"
