"""Ranks as child processes of rank 0."""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from loraplex.core.counts import counted
from loraplex.core.environment import child_environment
from loraplex.core.errors import ConfigError
from loraplex.engine.process import framed
from loraplex.parallel.executors import RankEnd
from loraplex.parallel.messages import RankStart

logger = logging.getLogger(__name__)

KILLS: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
"""Signals that come from outside: an operator, a container's end, a system short of memory."""
_KILL_SECONDS: Final = 10.0


class MultiprocessExecutor:
    """Implements Executor."""

    host = ""

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        """command: of the process of a rank, which calls be_rank_process."""
        self._command = command
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, starts: Sequence[RankStart], ended: Callable[[RankEnd], None]) -> None:
        num_ranks, num_processors = len(starts) + 1, len(os.sched_getaffinity(0))
        if num_ranks > num_processors:
            logger.warning(
                "%d ranks share %s: in each step the others wait for the slowest",
                *(num_ranks, counted(num_processors, "processor")),
            )
        for start in starts:
            rank = start.world.rank
            try:
                process = subprocess.Popen(
                    self._command(rank), stdin=subprocess.PIPE, env=child_environment()
                )
            except OSError as error:
                raise ConfigError(f"cannot start rank {rank}: {error.strerror}") from error
            self._processes.append(process)
            threading.Thread(
                target=_watch, args=(rank, process, ended), name=f"rank-{rank}", daemon=True
            ).start()
            message = framed(msgspec.structs.replace(start, parent_pid=os.getpid()))
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it died already: its watcher reports that
                process.stdin.write(message)
                process.stdin.close()

    def stop(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
        for process in self._processes:
            try:
                process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error("the process %d does not end though it was killed", process.pid)
        self._processes.clear()


def _watch(rank: int, process: subprocess.Popen[bytes], ended: Callable[[RankEnd], None]) -> None:
    status = process.wait()
    if status >= 0:
        ended(RankEnd(rank, f"(process {process.pid}) ended with status {status}"))
        return
    names = {int(number): number.name for number in signal.Signals}
    name = names.get(-status, f"signal {-status}")
    ended(RankEnd(rank, f"(process {process.pid}) was killed by {name}", -status in KILLS))
