"""The client of the staging worker: a process of its own that touches users' files.

Owns the process: spawns it when first needed, gives it one request at a time, and starts a new one
after a crash or a timeout. What is staged, and how, is staging_worker's business. This side loads
neither numpy nor torch.
"""

import asyncio
import dataclasses
import itertools
import logging
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import (
    StagedAdapter,
    StageReply,
    StageRequest,
    StagingLimits,
    TensorHeader,
)
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterTooLargeError,
    InvalidAdapterError,
    error_from_info,
)

__all__ = ["RequestTensor", "StagedAdapter", "StagingWorker"]

logger = logging.getLogger(__name__)

_WORKER_MODULE = "loraplex.adapters.staging_worker"
_LOG_BYTES = 65536
_LENGTH = struct.Struct("<Q")
_MAX_REPLY_BYTES = 256 << 20
_CLOSE_SECONDS = 5.0
_EXIT_SECONDS = 1.0  # from the end of its output to the end of the process
_CHUNK_BYTES = 1 << 20
_REQUEST_TENSORS = "the request's lora_weights"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestTensor:
    """A tensor as it came in a request: row-major, little-endian, in host memory."""

    dtype: str
    """By Triton's name (FP16, BF16, FP32, INT32) or NumPy's (float16, bfloat16, ...)."""
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def view(self) -> memoryview:
        """The bytes, whatever type the buffer's elements have."""
        return memoryview(self.data).cast("B")


class StagingWorker:
    """Stages one adapter at a time; further callers wait their turn."""

    def __init__(
        self,
        state_dir: Path,
        *,
        timeout_seconds: float = 600.0,
        command: tuple[str, ...] = (sys.executable, "-m", _WORKER_MODULE),
    ) -> None:
        self._state_dir = state_dir
        self._timeout_seconds = timeout_seconds
        self._command = command
        self._request_ids = itertools.count(1)
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._log_task: asyncio.Task[None] | None = None

    async def stage(
        self,
        path: str,
        *,
        shapes: BaseShapes,
        max_rank: int,
        base_model: str = "",
        base_path: str = "",
        base_check: BaseCheck = BaseCheck.WARN,
        pool_dtype: str = "",
        reads_again: bool = False,
    ) -> StagedAdapter:
        """Put the adapter at `path` into normal form and check it against the base.

        StageRequest says what each argument is.

        Raises what is wrong with it (InvalidAdapterError, AdapterMismatchError,
        AdapterTooLargeError, UnsupportedFeatureError), or AdapterLoadError if the worker died or
        ran out of time over it.
        """
        return await self._stage(
            StageRequest(
                request_id=next(self._request_ids),
                path=str(path),
                state_dir=str(self._state_dir),
                shapes=shapes,
                limits=StagingLimits(max_rank=max_rank),
                base_model=base_model,
                base_path=base_path,
                base_check=base_check,
                pool_dtype=pool_dtype,
                reads_again=reads_again,
            )
        )

    async def stage_tensors(
        self,
        lora_weights: RequestTensor,
        lora_config: RequestTensor,
        *,
        shapes: BaseShapes,
        max_rank: int,
        pool_dtype: str = "",
    ) -> StagedAdapter:
        """As stage, for TensorRT-LLM's tensors [1, N, W] and [1, N, 3 or 4] (or without the 1).

        The bytes go to the worker; this side only copies them.
        """
        tensors = (lora_weights, lora_config)
        weights, config = (TensorHeader(t.dtype, t.shape, t.view.nbytes) for t in tensors)
        limits = StagingLimits(max_rank=max_rank)
        if max(weights.num_bytes, config.num_bytes) > limits.max_file_bytes:
            raise AdapterTooLargeError(
                f"lora_weights has {weights.num_bytes} bytes, lora_config {config.num_bytes}; at "
                f"most {limits.max_file_bytes} are read"
            )
        request = StageRequest(
            request_id=next(self._request_ids),
            path=_REQUEST_TENSORS,
            tensors=(weights, config),
            state_dir=str(self._state_dir),
            shapes=shapes,
            limits=limits,
            pool_dtype=pool_dtype,
        )
        return await self._stage(request, [tensor.view for tensor in tensors])

    async def _stage(
        self, request: StageRequest, tensors: Sequence[memoryview] = ()
    ) -> StagedAdapter:
        try:
            body = msgspec.msgpack.encode(request)
        except UnicodeEncodeError as error:
            raise InvalidAdapterError("the adapter's path is not valid Unicode") from error
        async with self._turn:
            reply = await self._ask(request, [memoryview(body), *tensors])
        if reply.error is not None:
            raise error_from_info(reply.error)
        assert reply.staged is not None
        return reply.staged

    async def close(self) -> None:
        """End the worker; what it is doing fails."""
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
        await self._stop(_CLOSE_SECONDS)

    async def _ask(self, request: StageRequest, pieces: Sequence[memoryview]) -> StageReply:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._exchange(request.request_id, pieces)
        except TimeoutError as error:
            await self._stop(0.0)
            raise AdapterLoadError(
                f"staging {request.path} took longer than {self._timeout_seconds:g} s"
            ) from error
        except msgspec.DecodeError as error:
            await self._stop(0.0)
            raise AdapterLoadError(
                f"the staging worker gave no readable answer about {request.path}"
            ) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            status = await self._stop(_EXIT_SECONDS)
            raise AdapterLoadError(
                f"the staging worker died (exit status {status}) while it read {request.path}"
            ) from error
        except asyncio.CancelledError:
            # Its answer would be taken for that of the next request.
            await self._stop(0.0)
            raise

    async def _exchange(self, request_id: int, pieces: Sequence[memoryview]) -> StageReply:
        """`pieces` are the encoded request and what follows it."""
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_LENGTH.pack(pieces[0].nbytes))
        for piece in pieces:
            for start in range(0, piece.nbytes, _CHUNK_BYTES):
                process.stdin.write(piece[start : start + _CHUNK_BYTES])
                await process.stdin.drain()
        (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        if length > _MAX_REPLY_BYTES:
            raise msgspec.DecodeError(f"an answer of {length} bytes")
        reply = msgspec.msgpack.decode(await process.stdout.readexactly(length), type=StageReply)
        if reply.request_id != request_id:
            raise msgspec.DecodeError("an answer to another request")
        return reply

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            await self._stop(0.0)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is for serving alone
            )
            assert self._process.stderr is not None
            self._log_task = asyncio.create_task(_log_lines(self._process.stderr))
        return self._process

    async def _stop(self, grace_seconds: float) -> int | None:
        """Wait for the process to end, kill it after the grace, and reap it; its exit status."""
        process, self._process = self._process, None
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
        return status


async def _log_lines(stream: asyncio.StreamReader) -> None:
    """What the worker writes to stderr, until it ends."""
    while chunk := await stream.read(_LOG_BYTES):
        for line in chunk.decode(errors="replace").splitlines():
            logger.warning("staging worker: %s", line)
