"""Client of the staging workers, the only processes that read users' files.

One pool of workers stages local sources and tensors of requests, another one remote sources: a slow
download delays no local adapter. In each pool no tenant waits for the loads of another.

A worker has one request at a time. After a crash, a timeout or a cancelled caller, the next request
starts a new process; a cancelled caller never waits for the work that it gave up. A request whose
process a signal stopped or killed is repeated: that is seldom the adapter's fault. This side loads
neither numpy nor torch.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.fair_turns import FairTurns
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.sources.reference import SourceKind, parse, shown_source
from loraplex.adapters.staged import (
    REQUEST_TENSORS,
    Examination,
    StagedAdapter,
    StageReply,
    StageRequest,
)
from loraplex.adapters.tensor_file import StagingLimits, TensorHeader
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.closing import close_together
from loraplex.core.environment import child_environment
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterTooLargeError,
    InvalidAdapterError,
    error_from_info,
    passing_error,
)
from loraplex.core.python_process import module_command
from loraplex.core.rank_limits import RankLimits
from loraplex.core.stopped_process import ProcessStopped, how_it_ended, is_stopped, while_running

__all__ = ["RequestTensor", "StagedAdapter", "StagingWorker"]

logger = logging.getLogger(__name__)

_WORKER_MODULE = "loraplex.adapters.staging_worker"
OPERATOR = ""
"""Tenant of the loads that the operator's configuration needs."""

_LOG_BYTES = 65536
_LENGTH = struct.Struct("<Q")
_MAX_REPLY_BYTES = 256 << 20
_CLOSE_SECONDS = 5.0
_EXIT_SECONDS = 1.0  # from the end of its output to the end of the process
_CHUNK_BYTES = 1 << 20
_MAX_ATTEMPTS = 2
"""Number of processes that a request is given to, if signals stop or kill them."""
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "ERROR": logging.ERROR}


_POLL_SECONDS: Final = 0.01
"""Interval at which a process that is to end is looked at."""


class ChildProcess:
    """Process with sockets as its standard streams.

    uvloop copies the address space of this process to start another one (fork), on the event loop:
    12 ms of processor time for each GiB, and many times that on a busy machine. `subprocess` shares
    it until the program of the child begins (vfork), which takes half a millisecond.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        output: asyncio.StreamReader,
        input_: asyncio.StreamWriter,
        errors: asyncio.StreamReader,
        unused: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self.stdin, self.stdout, self.stderr = input_, output, errors
        self._process = process
        self._unused = unused

    @classmethod
    async def start(cls, command: Sequence[str]) -> "ChildProcess":
        """Start a process without API keys in its environment. Raises OSError."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_failure:
            pairs = socket.socketpair(), socket.socketpair()
            for our_end, their_end in pairs:
                on_failure.enter_context(our_end)
                theirs.enter_context(their_end)
            (data, their_data), (errors, their_errors) = pairs
            process = subprocess.Popen(
                command,
                stdin=their_data.fileno(),
                stdout=their_data.fileno(),
                stderr=their_errors.fileno(),
                env=child_environment(),
            )
            on_failure.pop_all()
        return cls(
            process,
            *await asyncio.open_connection(sock=data),
            *await asyncio.open_connection(sock=errors),
        )

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def end_input(self) -> None:
        """Let the process read the end of its input."""
        with contextlib.suppress(OSError):  # it has ended
            self.stdin.write_eof()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit status."""
        while (status := self.returncode) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return status

    def close(self) -> None:
        """Close the streams."""
        self.stdin.close()
        self._unused.close()


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
                process = await self._running()
                reply = await while_running(process.pid, _reply(process, pieces))
            if reply.request_id != request_id:
                raise msgspec.DecodeError("a reply to another request")
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


class StagingPool:
    """Processes that stage one adapter each at a time.

    A process takes half a second to start, and many on a busy machine. A load of a tenant without
    other loads takes the idle process that has run for longest, and another one starts for the load
    after it; further loads of a tenant leave that process to the other tenants.
    """

    def __init__(
        self, command: tuple[str, ...], timeout_seconds: float, max_idle: int, num_spare: int = 1
    ) -> None:
        """max_idle: number of loads that one tenant may run. num_spare: number of idle processes
        while loads run; with 2, one of them has been started before the last load began.

        Two processes more are kept: for the load of another tenant, and the spare one.
        """
        self._num_spare = num_spare
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._max_idle = max_idle + 2
        self._turns = FairTurns(max_idle)
        self._idle: list[StagingProcess] = []
        """Those that have run for longest are the last ones."""
        self._busy: set[StagingProcess] = set()
        self._is_closed = False

    @property
    def processes(self) -> list[StagingProcess]:
        return [*self._idle, *self._busy]

    async def request(
        self, tenant: str, request_id: int, what: str, pieces: Sequence[memoryview]
    ) -> StageReply:
        """Stage an adapter in a process, in the tenant's turn. See StagingProcess.request."""
        async with self._turns.turn(tenant) as num_running:
            if self._is_closed:
                raise AdapterLoadError(f"the server stops: {what} is not loaded")
            # No load waits for an idle process that a signal stopped.
            stopped = [process for process in self._idle if process.is_stopped]
            self._idle = [process for process in self._idle if process not in stopped]
            await asyncio.gather(*(process.kill_stopped() for process in stopped))
            # A further load of the tenant leaves the process that has run for longest to others.
            num_left = 0 if num_running == 1 else 1
            is_idle = len(self._idle) > num_left
            process = (
                self._idle.pop(-1 - num_left)
                if is_idle
                else StagingProcess(self._command, self._timeout_seconds)
            )
            self._busy.add(process)
            try:
                if tenant:  # the server's own loads come at its start, before any tenant's
                    await self.keep_idle(self._num_spare)
                return await process.request(request_id, what, pieces)
            finally:
                self._busy.discard(process)
                if process.is_running and len(self._idle) < self._max_idle:
                    self._idle.append(process)
                else:
                    await process.close()

    async def close(self) -> None:
        """End the processes; loads in progress fail, and so do those that wait."""
        self._is_closed = True
        await close_together(*(process.close() for process in self.processes))

    async def keep_idle(self, number: int) -> None:
        """Start processes for the next loads until so many are idle."""
        new = [
            StagingProcess(self._command, self._timeout_seconds)
            for _ in range(number - len(self._idle))
        ]
        self._idle[:0] = new
        await asyncio.gather(*(process.start() for process in new))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestTensor:
    """Tensor of a request: row-major, little-endian, in host memory."""

    dtype: str
    """Triton's name (FP16, BF16, FP32, INT32) or NumPy's (float16, bfloat16, ...)."""
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def view(self) -> memoryview:
        """Return the bytes, whatever the type of the buffer's elements is."""
        return memoryview(self.data).cast("B")


class StagingWorker:
    """Stages adapters in processes, several at a time."""

    def __init__(
        self,
        state_dir: Path,
        *,
        policy: SourcePolicy = SourcePolicy(),  # noqa: B008 - it is frozen
        timeout_seconds: float = 120.0,
        num_workers: int = 4,
        has_tenants: bool = False,
        command: tuple[str, ...] = module_command(_WORKER_MODULE),
    ) -> None:
        """Create the worker; its processes start later.

        policy: rules for sources that clients name. timeout_seconds: limit of one load, to which a
        remote source adds the time of its download. num_workers: number of local and of remote
        sources that are read at a time. has_tenants: a load of one tenant finds a started process
        while another's has just begun.
        """
        self._state_dir = state_dir
        self.policy = policy
        self._request_ids = itertools.count(1)
        self._num_spare = num_spare = 2 if has_tenants else 1
        self._local = StagingPool(command, timeout_seconds, num_workers, num_spare)
        remote_seconds = timeout_seconds + policy.max_seconds
        self._remote = StagingPool(command, remote_seconds, num_workers, num_spare)

    async def stage(
        self,
        path: str,
        *,
        shapes: BaseShapes,
        max_ranks: RankLimits,
        base_model: str = "",
        base_path: str = "",
        base_check: BaseCheck = BaseCheck.AUTO,
        pool_dtype: str = "",
        reads_again: bool = False,
        is_trusted: bool = True,
        tenant: str = OPERATOR,
        upload: Path | None = None,
    ) -> StagedAdapter:
        """Put the adapter at `path` into canonical form and check it against the base.

        StageRequest documents the arguments; `path` is any source (sources/reference.py), or with
        `upload` the name of an upload.
        is_trusted: the operator named it; otherwise the policy for clients applies. tenant: the one
        whose load it is; its loads wait for each other only.

        Raises what is wrong with it (InvalidAdapterError, AdapterMismatchError,
        AdapterTooLargeError, UnsupportedFeatureError, PermissionDeniedError), StorageFullError, or
        AdapterLoadError if its source does not respond, or the worker died or exceeded its time
        limit.
        """
        request = StageRequest(
            request_id=next(self._request_ids),
            path=str(path),
            upload="" if upload is None else str(upload),
            state_dir=str(self._state_dir),
            shapes=shapes,
            limits=StagingLimits(max_ranks=max_ranks, max_file_bytes=self.policy.max_bytes),
            policy=self.policy.for_operator() if is_trusted else self.policy,
            base_model=base_model,
            base_path=base_path,
            base_check=base_check,
            pool_dtype=pool_dtype,
            reads_again=reads_again,
        )
        reply = await self._request(request, tenant)
        assert reply.staged is not None
        return reply.staged

    async def examine(
        self,
        path: str,
        *,
        shapes: BaseShapes,
        max_ranks: RankLimits,
        base_path: str,
        pool_dtype: str,
        tenant: str,
        upload: Path | None = None,
    ) -> Examination:
        """Account for every tensor of an adapter that a client names. Raises as `stage`, if they
        cannot be listed."""
        request = StageRequest(
            request_id=next(self._request_ids),
            path=path,
            upload="" if upload is None else str(upload),
            examines=True,
            state_dir=str(self._state_dir),
            shapes=shapes,
            limits=StagingLimits(max_ranks=max_ranks, max_file_bytes=self.policy.max_bytes),
            policy=self.policy,
            base_path=base_path,
            pool_dtype=pool_dtype,
        )
        reply = await self._request(request, tenant)
        assert reply.examined is not None
        return reply.examined

    async def stage_tensors(
        self,
        lora_weights: RequestTensor,
        lora_config: RequestTensor,
        *,
        shapes: BaseShapes,
        max_ranks: RankLimits,
        pool_dtype: str = "",
        tenant: str = OPERATOR,
    ) -> StagedAdapter:
        """Stage TensorRT-LLM's tensors [1, N, W] and [1, N, 3 or 4] (or without the 1).

        The bytes go to the worker; this side only copies them.
        """
        tensors = (lora_weights, lora_config)
        weights, config = (TensorHeader(t.dtype, t.shape, t.view.nbytes) for t in tensors)
        limits = StagingLimits(max_ranks=max_ranks, max_file_bytes=self.policy.max_bytes)
        if max(weights.num_bytes, config.num_bytes) > limits.max_file_bytes:
            raise AdapterTooLargeError(
                f"lora_weights has {readable_bytes(weights.num_bytes)}, lora_config "
                f"{readable_bytes(config.num_bytes)}; at most "
                f"{readable_bytes(limits.max_file_bytes)} are read (max_adapter_bytes)"
            )
        request = StageRequest(
            request_id=next(self._request_ids),
            path=REQUEST_TENSORS,
            tensors=(weights, config),
            state_dir=str(self._state_dir),
            shapes=shapes,
            limits=limits,
            pool_dtype=pool_dtype,
        )
        reply = await self._request(request, tenant, [tensor.view for tensor in tensors])
        assert reply.staged is not None
        return reply.staged

    async def _request(
        self, request: StageRequest, tenant: str, tensors: Sequence[memoryview] = ()
    ) -> StageReply:
        is_here = bool(request.upload or tensors) or parse(request.path).kind is SourceKind.LOCAL
        pool = self._local if is_here else self._remote
        try:
            body = msgspec.msgpack.encode(request)
        except UnicodeEncodeError as error:
            raise InvalidAdapterError("the adapter's path is not valid Unicode") from error
        what = shown_source(request.path)
        reply = await pool.request(tenant, request.request_id, what, [memoryview(body), *tensors])
        if reply.error is not None:
            raise error_from_info(reply.error)
        return reply

    async def start(self) -> None:
        """Start a worker of local sources, so that the first adapter does not wait for it."""
        await self._local.keep_idle(1)

    async def keep_spare(self) -> None:
        """Start the workers that are to be idle for tenants' loads."""
        for pool in (self._local, self._remote) if self.policy.hosts else (self._local,):
            await pool.keep_idle(self._num_spare)

    async def close(self) -> None:
        """End the workers; loads in progress fail."""
        await close_together(self._local.close(), self._remote.close())
