"""Client side of one staging worker's process: starts it when needed, sends requests, replaces it.

It sends one request at a time. After a crash, a timeout or a cancelled caller, the next request
starts a new process; a cancelled caller never waits for the work that it gave up. A request whose
process a signal stopped or killed is repeated: that is seldom the adapter's fault.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Sequence

import msgspec

from loraplex.adapters.child_process import ChildProcess
from loraplex.adapters.staged import StageReply
from loraplex.core.errors import AdapterLoadError, passing_error
from loraplex.core.stopped_process import (
    ProcessStopped,
    how_it_ended,
    is_stopped,
    while_running,
)

logger = logging.getLogger(__name__)

_LOG_BYTES = 65536
_LENGTH = struct.Struct("<Q")
_MAX_REPLY_BYTES = 256 << 20
_CLOSE_SECONDS = 5.0
_EXIT_SECONDS = 1.0  # from the end of its output to the end of the process
_CHUNK_BYTES = 1 << 20
_MAX_ATTEMPTS = 2
"""Number of processes that a request is given to, if signals stop or kill them."""
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "ERROR": logging.ERROR}


class _WorkerLost(Exception):
    """A signal stopped or killed the process; the text is how, as a verb."""


class StagingProcess:
    """Process of a staging worker, for one request at a time."""

    def __init__(self, command: tuple[str, ...], timeout_seconds: float) -> None:
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._log_task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        """Held while the process is started: the first request may come meanwhile."""
        self.process: ChildProcess | None = None

    async def request(self, request_id: int, what: str, pieces: Sequence[memoryview]) -> StageReply:
        """Send an encoded request with its tensors (`pieces`) and return the reply.

        `what` names the adapter in messages. A process that a signal stopped or killed is replaced,
        and the request repeated once. Raises AdapterLoadError if the process died or exceeded its
        time limit.
        """
        how = ""
        for _ in range(_MAX_ATTEMPTS):
            try:
                return await self._request(request_id, what, pieces)
            except _WorkerLost as lost:
                how = str(lost)
            logger.error("the staging worker that read %s %s", what, how)
        raise AdapterLoadError(
            f"two staging workers were lost while they read {what}; the last one {how}: please try "
            "again"
        )

    async def start(self) -> None:
        """Start the process before it is needed. The first request raises what prevented it."""
        with contextlib.suppress(OSError):
            await self._running()

    @property
    def is_running(self) -> bool:
        """Whether there is a process: the next request does not wait for its start."""
        return self.process is not None and self.process.returncode is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped the process."""
        return self.process is not None and self.is_running and is_stopped(self.process.pid)

    async def kill_stopped(self) -> None:
        """Kill the process, which a signal stopped while it was idle."""
        logger.error("an idle staging worker was stopped by a signal, and is killed")
        await self._stop(0.0)

    async def close(self) -> None:
        """End the process; a request in progress fails."""
        process = self.process
        if process is not None and process.returncode is None:
            process.end_input()
        await self._stop(_CLOSE_SECONDS)

    async def _request(
        self, request_id: int, what: str, pieces: Sequence[memoryview]
    ) -> StageReply:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                reply = await self._exchange(request_id, pieces)
        except TimeoutError as error:
            await self._stop(0.0)
            raise AdapterLoadError(
                f"staging {what} took longer than {self._timeout_seconds:g} s"
            ) from error
        except msgspec.DecodeError as error:
            await self._stop(0.0)
            raise AdapterLoadError(
                f"the staging worker sent an unreadable reply about {what}"
            ) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            status = await self._stop(_EXIT_SECONDS)
            if (passing := passing_error(error)) is not None:
                raise passing from error
            if status is not None and status < 0:
                raise _WorkerLost(how_it_ended(status)) from error
            raise AdapterLoadError(
                f"the staging worker died (exit status {status}) while it read {what}"
            ) from error
        except ProcessStopped as error:
            await self._stop(0.0)
            raise _WorkerLost("was stopped by a signal, and is killed") from error
        except asyncio.CancelledError:
            # Its reply would be taken for the reply to the next request.
            await self._stop(0.0)
            raise
        if reply.is_last:
            await self._stop(_EXIT_SECONDS)
        return reply

    async def _exchange(self, request_id: int, pieces: Sequence[memoryview]) -> StageReply:
        process = await self._running()
        reply = await while_running(process.pid, _reply(process, pieces))
        if reply.request_id != request_id:
            raise msgspec.DecodeError("a reply to another request")
        return reply

    async def _running(self) -> ChildProcess:
        async with self._starting:
            if self.process is None or self.process.returncode is not None:
                await self._stop(0.0)
                self.process = await ChildProcess.start(self._command)
                self._log_task = asyncio.create_task(_log_lines(self.process.stderr))
            return self.process

    async def _stop(self, grace_seconds: float) -> int | None:
        """Wait for the process to end, kill it after the grace; return its exit status."""
        process, self.process = self.process, None
        log_task, self._log_task = self._log_task, None
        if process is None:
            return None
        try:
            async with asyncio.timeout(grace_seconds):
                status = await process.wait()
        except TimeoutError:
            if process.returncode is None:
                process.kill()
            status = await process.wait()
        if log_task is not None:
            await log_task
        process.close()
        return status


async def _reply(process: ChildProcess, pieces: Sequence[memoryview]) -> StageReply:
    """Send a request, and wait for the reply."""
    process.stdin.write(_LENGTH.pack(pieces[0].nbytes))
    for piece in pieces:
        for start in range(0, piece.nbytes, _CHUNK_BYTES):
            process.stdin.write(piece[start : start + _CHUNK_BYTES])
            await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    if length > _MAX_REPLY_BYTES:
        raise msgspec.DecodeError(f"a reply of {length} bytes")
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=StageReply)


async def _log_lines(stream: asyncio.StreamReader) -> None:
    """Log the worker's stderr until it ends. A line may begin with its level."""
    while chunk := await stream.read(_LOG_BYTES):
        for line in chunk.decode(errors="replace").splitlines():
            level, _, text = line.partition(" ")
            if level in _LEVELS:
                logger.log(_LEVELS[level], "staging worker: %s", text)
            else:
                logger.warning("staging worker: %s", line.removeprefix("WARNING "))
