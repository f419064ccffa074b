"""Client side of a sandbox process: start it when it is needed, run tasks in it, replace it after a
task that was too much for it."""

import asyncio
import collections
import contextlib
import logging
import operator
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, Final

import msgspec

from loraplex.core.environment import child_environment
from loraplex.core.errors import (
    InternalError,
    LoraplexError,
    NotReadyError,
    QueueFullError,
    RequestError,
    error_from_info,
)
from loraplex.core.fair_thread_pool import FairThreadPool
from loraplex.core.python_process import module_command
from loraplex.core.stopped_process import LOOK_SECONDS, ProcessStopped, StopWatch, is_stopped
from loraplex.serving.sandbox.worker import LENGTH, Reply
from loraplex.serving.wire_request import current_tenant

logger = logging.getLogger(__name__)

_WALL_SECONDS: Final = 30.0
"""Wall time limit of a task, far above its processor time: a busy machine may have little of that
to give."""
_EXIT_SECONDS: Final = 5.0
"""Limit from the end of the output to the end of the process."""
_NUM_PROCESSES: Final = 2
"""Number for each kind and model: a tenant has one at most, so the others have one, too."""
_MAX_ATTEMPTS: Final = 2
"""Number of processes that a task is given to, if processes are stopped or killed."""

_MAX_WAITING_BYTES: Final = 1 << 26
"""Limit on the sizes of all tasks of one tenant that wait for one process."""

Process = subprocess.Popen[bytes]


class SandboxKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work in sandbox processes: its program, its limits and its error messages."""

    module: str
    """Python module which calls `sandbox.worker.main`."""
    work: str
    """Plural noun for error messages: what the process works on."""
    max_seconds: float
    """Processor time of one task."""
    max_bytes: int
    """Address space; stacks of threads and libraries take some hundred MiB of it."""
    error: type[RequestError]
    """Error for a task that exceeds the limits."""
    param: str
    """Request field that such an error names."""
    too_slow: str
    too_big: str

    @property
    def command(self) -> tuple[str, ...]:
        limits = (str(self.max_seconds), str(self.max_bytes))
        return module_command(self.module, *limits)


class _ProcessKilled(Exception):
    """Something else, such as the system without memory, has killed the process."""


class Sandbox:
    """Runs tasks of one kind in two processes, off the event loop.

    Tenants take turns, and none has both processes: a task of another tenant does not wait for
    those of one. Nothing starts before the first task.
    """

    def __init__(self, kind: SandboxKind, setup: Callable[[], bytes]) -> None:
        """`setup` makes the first message to each process; it is called in a thread."""
        self._kind = kind
        self._processes = [SandboxProcess(kind, setup) for _ in range(_NUM_PROCESSES)]
        self._idle = self._processes.copy()
        self._choosing = threading.Lock()
        self._threads = FairThreadPool(_NUM_PROCESSES, _NUM_PROCESSES - 1, "sandbox")
        self._waiting_bytes: collections.Counter[str] = collections.Counter()
        """Sizes of the tasks that wait or run, by tenant."""

    async def run(self, task: bytes) -> bytes:
        """Return the result of a task.

        Raises QueueFullError if too much of the tenant waits, the error of the kind if the task
        exceeds its limits, NotReadyError if signals stopped the processes, and the error that the
        task raised.
        """
        tenant, waiting = current_tenant(), self._waiting_bytes
        if waiting[tenant] + len(task) > _MAX_WAITING_BYTES:
            raise QueueFullError(
                f"{self._kind.work} of {waiting[tenant]} bytes wait to be processed",
                retry_after_seconds=2,
            )
        waiting[tenant] += len(task)
        try:
            return await asyncio.wrap_future(self._threads.submit_for(tenant, self._run, task))
        finally:
            waiting[tenant] -= len(task)
            if not waiting[tenant]:
                del waiting[tenant]

    def close(self) -> None:
        """End the processes; the running tasks and those that wait fail."""
        with contextlib.ExitStack() as stack:
            for process in self._processes:
                stack.callback(process.close)
            self._threads.shutdown(wait=False)

    def _run(self, task: bytes) -> bytes:
        """Run a task in a process that has been started already, if one is idle."""
        with self._choosing:
            process = max(self._idle, key=operator.attrgetter("is_running"))
            self._idle.remove(process)
            spares = self._idle.copy()
        try:
            for spare in spares:
                if not spare.is_running:
                    spare.prepare()
            return process.run(task)
        finally:
            if not process.is_running:
                process.make_ready()  # the tenant that wore it out waits, and not the next one
            self._idle.append(process)


class SandboxProcess:
    """Process of one kind. One thread at a time may use it; close() may come from another."""

    def __init__(self, kind: SandboxKind, setup: Callable[[], bytes]) -> None:
        self._kind = kind
        self._setup = setup
        self._process: Process | None = None
        self._unsent: bytes | None = None
        """Setup of a new process, which it receives before its first task."""
        self._lock = threading.Lock()
        self._in_use = threading.Lock()
        """Held from a task to its reply, so that close() does not close pipes being read."""
        self._is_closed = False

    def run(self, task: bytes) -> bytes:
        """Return the result of a task; raises as `Sandbox.run`.

        A process that a signal stopped or killed is replaced, and the task repeated once. Two
        processes killed are the task's doing: the system was out of memory.
        """
        with self._in_use:
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                try:
                    process = self._ready()
                    reply = self._reply(process, task)
                except ProcessStopped:
                    logger.error("the process for %s was stopped: it is killed", self._kind.work)
                except _ProcessKilled:
                    logger.error("the process for %s was killed", self._kind.work)
                    if attempt == _MAX_ATTEMPTS:
                        raise self._exceeded(self._kind.too_big) from None
                else:
                    if reply.is_last:
                        _end(process, _EXIT_SECONDS)
                    if reply.error is not None:
                        raise error_from_info(reply.error)
                    return reply.result
        raise NotReadyError(
            f"the processes for {self._kind.work} were stopped by a signal: please try again",
            retry_after_seconds=1,
        )

    @property
    def is_running(self) -> bool:
        """Whether there is a process: the next task does not wait for its start."""
        process = self._process
        return process is not None and process.poll() is None

    def prepare(self) -> None:
        """Start the process if there is none and no task starts it. A failure is the next task's.

        It imports what it needs before a task waits.
        """
        if self._in_use.acquire(blocking=False):
            try:
                with contextlib.suppress(InternalError):
                    self._ready(waits=False)
            finally:
                self._in_use.release()

    def make_ready(self) -> None:
        """Start the process if there is none, and wait until it takes tasks.

        A failure is the next task's.
        """
        with self._in_use, contextlib.suppress(LoraplexError, ProcessStopped, _ProcessKilled):
            self._ready()

    def close(self) -> None:
        """End the process; the running task fails."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()
            with self._in_use:
                _end(process, _EXIT_SECONDS)

    def _ready(self, *, waits: bool = True) -> Process:
        """Return the process, started if there is none; if `waits`, when it has its setup."""
        with self._lock:
            if self._is_closed:
                raise InternalError("the server is closing")
            if self._process is not None and is_stopped(self._process.pid):
                logger.error("the process for %s was stopped: it is killed", self._kind.work)
                _end(self._process, 0.0)
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            process = self._process
        if waits and self._unsent is not None:
            setup, self._unsent = self._unsent, None
            self._reply(process, setup)
        return process

    def _reply(self, process: Process, body: bytes) -> Reply:
        """Return the reply to a message. If it raises, the process has ended."""
        try:
            return _exchange(process, body)
        except ProcessStopped:
            _end(process, 0.0)
            raise
        except TimeoutError:
            _end(process, 0.0)
            raise self._exceeded(self._kind.too_slow) from None
        except (OSError, EOFError):
            status = _end(process, _EXIT_SECONDS)
            if self._is_closed:
                raise InternalError("the server is closing") from None
            if status >= 0:  # no signal: a bug of the worker, not the task's doing
                message = f"the process for {self._kind.work} ended with status {status}"
                raise InternalError(message) from None
            if status == -signal.SIGKILL:  # not one of the worker's own limits
                raise _ProcessKilled from None
            is_slow = status == -signal.SIGPROF
            raise self._exceeded(self._kind.too_slow if is_slow else self._kind.too_big) from None

    def _exceeded(self, message: str) -> RequestError:
        return self._kind.error(message, param=self._kind.param)

    def _started(self) -> Process:
        self._unsent = self._setup()
        try:
            process = subprocess.Popen(
                self._kind.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=child_environment(),
                process_group=0,  # no Ctrl-C meets its first moments; see core.process_group
            )
        except OSError as error:
            message = f"no process for {self._kind.work} can be started: {error}"
            raise InternalError(message) from error
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process


def _exchange(process: Process, body: bytes) -> Reply:
    """Send a message to a process and return the reply, within the wall time of a task.

    Raises EOFError or OSError if the process ends meanwhile, TimeoutError if no reply comes,
    ProcessStopped if a signal stops the process.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    limits = time.monotonic() + _WALL_SECONDS, StopWatch(process.pid)
    # A process that reads nothing must not block this thread, so the pipe does not block.
    rest = memoryview(LENGTH.pack(len(body)) + body)
    while rest:
        _await(process.stdin, select.POLLOUT, *limits)
        rest = rest[os.write(process.stdin.fileno(), rest) :]
    data, size = bytearray(), LENGTH.size
    while len(data) < size:
        _await(process.stdout, select.POLLIN, *limits)
        piece = os.read(process.stdout.fileno(), size - len(data))
        if not piece:
            raise EOFError
        data += piece
        if len(data) == LENGTH.size:
            size += LENGTH.unpack(data)[0]
    return msgspec.msgpack.decode(data[LENGTH.size :], type=Reply)


def _await(stream: IO[bytes], event: int, deadline: float, watch: StopWatch) -> None:
    poll = select.poll()  # select() refuses file descriptors above 1023
    poll.register(stream, event)
    while not poll.poll(1000 * max(0.0, min(LOOK_SECONDS, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise TimeoutError
        watch.look()


def _end(process: Process, grace_seconds: float) -> int:
    """Wait for the end of a process, kill it after the grace; return its exit status."""
    try:
        status = process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # it did not read everything
                pipe.close()
    return status
