"""A library that has no server, run by a worker of ours in its own virtual environment.

The worker is `workers/serve.py`, which documents the messages.
"""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec

from comparison.processes import Launch, ServerProcess
from loraplex.core.errors import ConfigError

_SERVE = Path(__file__).with_name("workers") / "serve.py"
_LOADED = 0
"""The id of the worker's first message."""


class _Id(msgspec.Struct, frozen=True):
    """The part of a reply that is read while a run lasts."""

    id: int


class Reply(msgspec.Struct, frozen=True):
    """Reply of the worker to one message."""

    tokens: tuple[int, ...] = ()
    token_ns: tuple[int, ...] = ()
    """When the worker knew each token, on the clock of time.perf_counter_ns()."""
    error: str | None = None
    unsupported: str | None = None
    """Instead of `error`: the library cannot do it at all."""


class WorkerProcess:
    """A worker, and the requests that wait for its responses."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._ids = itertools.count(_LOADED + 1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._has_ended = False
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        python: Path,
        module: str,
        options: dict[str, Any],
        *,
        log: Path,
        variables: dict[str, str],
        seconds: float,
    ) -> "WorkerProcess":
        """Run `workers/<module>.py` under that Python; returns when it is loaded.

        variables: of its environment. Raises ConfigError with the end of the log.
        """
        command = [str(python), str(_SERVE), module, msgspec.json.encode(options).decode()]
        process = await ServerProcess.start(command, log, variables, pipes=True)
        worker = cls(process)
        loaded = worker._expect(_LOADED)

        async def is_loaded() -> bool:
            await asyncio.wait([loaded], timeout=0.05)
            return loaded.done() and not loaded.cancelled() and loaded.exception() is None

        try:
            await process.wait_until(is_loaded, seconds)
        except BaseException:
            loaded.cancel()
            await worker.stop()
            raise
        return worker

    @property
    def launch(self) -> Launch:
        return self._process.launch

    @property
    def pid(self) -> int:
        return self._process.pid

    async def request(self, op: str, **arguments: Any) -> bytes:
        """Send a message; return the response line. Raises ConfigError if the worker ends."""
        if self._has_ended:
            raise self._ended()
        request_id = next(self._ids)
        response = self._expect(request_id)
        message = msgspec.json.encode({"id": request_id, "op": op, **arguments})
        self._process.stdin.write(message + b"\n")
        return await response

    async def stop(self) -> None:
        """Idempotent."""
        if not self._has_ended:
            self._process.stdin.close()
        await self._process.stop()
        await self._reader

    def _expect(self, request_id: int) -> asyncio.Future[bytes]:
        self._waiting[request_id] = asyncio.get_running_loop().create_future()
        return self._waiting[request_id]

    async def _read(self) -> None:
        """Give each line to who waits for it, until there are no more."""
        async for line in self._process.stdout:
            reply = self._waiting.pop(msgspec.json.decode(line, type=_Id).id, None)
            if reply is not None and not reply.done():
                reply.set_result(line)
        self._has_ended = True
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(self._ended())
        self._waiting.clear()

    def _ended(self) -> ConfigError:
        return ConfigError(f"the worker ended: {self._process.log_tail()}")


def decode(line: bytes) -> Reply:
    """A response of `WorkerProcess.request`."""
    return msgspec.json.decode(line, type=Reply)
