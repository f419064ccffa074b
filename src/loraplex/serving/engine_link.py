"""Serving's end of the line to one engine: in a thread, or in its own process.

A link lives as long as its engine. It knows messages, not requests.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from io import RawIOBase
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from loraplex.core.config import child_environment
from loraplex.engine.channel import EPOCH_BYTES, EngineChannel, ThreadChannel
from loraplex.engine.messages import EngineCommand, EngineEvent, Shutdown, decode_event, encode

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4


class EngineDied(Exception):
    """The engine is gone. Says how, for the log."""


class EngineLink(Protocol):
    def send(self, command: EngineCommand) -> None:
        """Queue a command; what is sent to a dead engine is lost, and receive() says so."""
        ...

    async def receive(self) -> EngineEvent:
        """The next event. Raises EngineDied once the engine is gone and all events are read."""
        ...

    async def close(self) -> None:
        """Stop the engine and wait until it is gone."""
        ...


LinkFactory = Callable[[int], Awaitable[EngineLink]]
"""Starts an engine with the given epoch."""


class ThreadLink:
    """An engine in a thread of this process: for the library, and for tests."""

    def __init__(self, run: Callable[[EngineChannel], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        self._channel = ThreadChannel(self._deliver)
        self._run = run
        self._thread = threading.Thread(target=self._main, name="loraplex-engine", daemon=True)
        self._thread.start()

    def send(self, command: EngineCommand) -> None:
        self._channel.put(command)

    async def receive(self) -> EngineEvent:
        event = await self._events.get()
        if event is None:
            raise EngineDied("the engine's thread ended")
        return event

    async def close(self) -> None:
        self._channel.put(Shutdown())
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        try:
            self._run(self._channel)
        except Exception:
            logger.exception("the engine's thread failed")
        finally:
            self._deliver(None)

    def _deliver(self, event: EngineEvent | None) -> None:
        # The loop may be gone already when the interpreter shuts down.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class EngineStart(msgspec.Struct, frozen=True):
    """What an engine process reads from its standard input: 4 bytes of length, then msgpack.

    The pipe then stays open: its end tells the engine that serving is gone.
    """

    endpoint: str
    epoch: int
    settings: bytes

    def to_bytes(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_engine_start(pipe: RawIOBase) -> EngineStart:
    """The engine's end of an unbuffered pipe. Raises EOFError if serving is gone."""
    length = int.from_bytes(_read_exactly(pipe, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_read_exactly(pipe, length), type=EngineStart)


def _read_exactly(pipe: RawIOBase, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = pipe.read(count - len(data))
        if not piece:
            raise EOFError("serving ended before it had said what to start")
        data += piece
    return data


class ProcessLink:
    """An engine in its own process. Its death is seen by its exit, not by the socket."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.asyncio.Socket,
        epoch: int,
        folder: str,
    ) -> None:
        self._process = process
        self._socket = socket
        self._epoch = epoch.to_bytes(EPOCH_BYTES, "big")
        self._folder = folder
        self._identity: bytes | None = None
        self._exited = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str], settings: bytes, epoch: int) -> "ProcessLink":
        """Spawn `command`, which must read an EngineStart and connect to its endpoint."""
        folder = tempfile.mkdtemp(prefix="loraplex-")  # mode 0700: nobody else may connect
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        endpoint = f"ipc://{os.path.join(folder, 'engine')}"
        socket.bind(endpoint)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, env=child_environment()
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already: receive() will tell
            process.stdin.write(EngineStart(endpoint, epoch, settings).to_bytes())
            await process.stdin.drain()
        return cls(process, socket, epoch, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: EngineCommand) -> None:
        assert self._identity is not None, "an engine is told nothing before it is ready"
        self._socket.send_multipart([self._identity, self._epoch, encode(command)])

    async def receive(self) -> EngineEvent:
        while True:
            if not await self._readable():
                status = self._exited.result()
                raise EngineDied(f"the engine process {self.pid} ended with status {status}")
            identity, epoch, payload = await self._socket.recv_multipart()
            if epoch == self._epoch:
                self._identity = identity
                return decode_event(payload)

    async def _readable(self) -> bool:
        """Wait for an event or the engine's end; the events of a dead engine are read first."""
        if self._exited.done():
            return bool(await self._socket.poll(0))
        poll = asyncio.ensure_future(self._socket.poll())
        await asyncio.wait({poll, self._exited}, return_when=asyncio.FIRST_COMPLETED)
        if poll.done():
            return True
        poll.cancel()
        return bool(await self._socket.poll(100))

    async def close(self) -> None:
        if self._identity is not None and not self._exited.done():
            self.send(Shutdown())
            await asyncio.wait({self._exited}, timeout=5)
        if not self._exited.done():
            self._process.kill()
        await self._exited
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
