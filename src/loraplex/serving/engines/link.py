"""Serving's end of the line to one engine: in a thread, or in its own process.

A link lives as long as its engine. It knows messages, not requests.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Protocol

from loraplex.core.config import ModelConfig
from loraplex.core.environment import child_environment
from loraplex.core.errors import ConfigError
from loraplex.core.private_folder import PrivateFolder
from loraplex.core.request import RequestId
from loraplex.core.stopped_process import how_it_ended, is_stopped
from loraplex.engine.channel import (
    EPOCH_BYTES,
    FRAME_HEAD,
    READ_BYTES,
    EngineChannel,
    FrameReader,
    ThreadChannel,
)
from loraplex.engine.messages import (
    ConfirmEvents,
    EngineCommand,
    EngineEnded,
    EngineEvent,
    Shutdown,
    decode_event,
    encode,
)
from loraplex.engine.process import EngineStart, framed
from loraplex.engine.step_marker import Progress, create_marker_file
from loraplex.serving.engines.engine_state import EngineEnd

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 0.1
"""How long to wait for events of an engine that died without EngineEnded. Its requests continue
after what has come."""
_STOP_SECONDS = 5.0
_KILL_SECONDS = 10.0
"""After that a killed process is given up: it waits for a driver, and ends when that lets it."""
_NUM_FILES: Final = 16
"""Upper bound of the files that the link to one engine and its process open."""
_KILLS: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
"""Signals that come from outside: an operator, a container's end, a system short of memory."""


class EngineDied(Exception):
    """The engine is gone; the message has the cause for the log."""

    def __init__(
        self,
        message: str,
        in_flight: Collection[RequestId] = (),
        end: EngineEnd = EngineEnd.CRASH,
    ) -> None:
        """in_flight: the requests of its steps in flight."""
        super().__init__(message)
        self.in_flight = in_flight
        self.end = end


class EngineLink(Protocol):
    def send(self, command: EngineCommand) -> None:
        """Queue a command. One sent to a dead engine is lost, and receive() reports the death."""
        ...

    async def receive(self) -> EngineEvent:
        """The next event. Raises EngineDied once the engine is gone and all events are read."""
        ...

    def progress(self) -> Progress | None:
        """Return what the engine did until now; None if it is not watched, since nothing can end
        it."""
        ...

    def kill(self, problem: str) -> None:
        """End an engine that hangs; receive() then reports its death, with the problem."""
        ...

    async def close(self) -> None:
        """Stop the engine and wait until it is gone."""
        ...


LinkFactory = Callable[[int], Awaitable[EngineLink]]
"""Starts an engine with the given epoch."""

EngineLauncher = Callable[[ModelConfig], LinkFactory]
"""Where a model's engine runs: in a process of its own, or in a thread."""


class ThreadLink:
    """An engine in a thread of this process: for the library, and for tests."""

    def __init__(self, run: Callable[[EngineChannel], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        self._folder = PrivateFolder()
        self._channel = ThreadChannel(self._deliver, Path(self._folder.path))
        self._run = run
        self._thread = threading.Thread(target=self._main, name="loraplex-engine", daemon=True)
        self._thread.start()

    def send(self, command: EngineCommand) -> None:
        self._channel.put(command)

    async def receive(self) -> EngineEvent:
        event = await self._events.get()
        if event is None:
            raise EngineDied("the engine's thread ended", self._channel.marker.request_ids())
        return event

    def progress(self) -> None:
        """A thread cannot be killed."""

    def kill(self, problem: str) -> None:
        raise NotImplementedError(f"the engine's thread cannot be killed: {problem}")

    async def close(self) -> None:
        self._channel.put(Shutdown())
        await asyncio.to_thread(self._thread.join)
        self._folder.remove()

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


class ProcessLink:
    """An engine in its own process. Its death is seen by its exit, not by the socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, endpoint: "_Endpoint", epoch: int
    ) -> None:
        self._process = process
        self._endpoint = endpoint
        self._epoch = epoch.to_bytes(EPOCH_BYTES, "big")
        self._is_ready = False
        """Whether an event has come."""
        self._exited = asyncio.create_task(process.wait())
        self._exited.add_done_callback(lambda _: endpoint.wake())
        self._has_all_events = False
        self._problem = ""
        """Why the process was killed from here."""

    @classmethod
    async def start(cls, command: Sequence[str], settings: bytes, epoch: int) -> "ProcessLink":
        """Spawn `command`, which must read an EngineStart and connect to its endpoint.

        Raises ConfigError if there is no place for the endpoint, OSError if nothing can be spawned
        or no more files can be opened.
        """
        endpoint = _Endpoint()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                env=child_environment(),
            )
        except BaseException:
            endpoint.close()
            raise
        link = cls(process, endpoint, epoch)
        try:
            await link._send_start(
                EngineStart(
                    endpoint.address, epoch, settings, endpoint.marker_path, endpoint.logits_dir
                )
            )
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: EngineCommand) -> None:
        assert self._is_ready, "an engine receives nothing before it is ready"
        message = encode(command)
        self._endpoint.write(FRAME_HEAD.pack(len(message), self._epoch) + message)

    async def receive(self) -> EngineEvent:
        while (frame := await self._next_frame()) is not None:
            epoch, message = frame
            if epoch == self._epoch:
                self._is_ready = True
                event = decode_event(message)
                if not isinstance(event, EngineEnded):
                    return event
                self._has_all_events = True
                self.send(ConfirmEvents())
        status = None if self._exited.cancelled() else self._exited.result()
        words = self._endpoint.marker.last_words()
        was_killed = words.is_kill if words else status is not None and -status in _KILLS
        end = EngineEnd.KILL if was_killed else EngineEnd.CRASH
        how = self._problem or (f"ended: {words.reason}" if words else how_it_ended(status))
        raise EngineDied(
            f"the engine process {self.pid} {how}",
            self._endpoint.marker.request_ids(),
            EngineEnd.HANG if self._problem else end,
        )

    def progress(self) -> Progress:
        return self._endpoint.marker.progress()._replace(is_stopped=is_stopped(self.pid))

    def kill(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._kill()

    def _kill(self) -> None:
        if not self._exited.done():
            self._process.kill()
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if not self._exited.done():
            logger.error("the engine process %d does not end though it was killed", self.pid)
            self._exited.cancel()

    async def close(self) -> None:
        try:
            if self._is_ready and not self._exited.done():
                self.send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._read_to_end(), _STOP_SECONDS)
        finally:
            self._kill()
            await asyncio.wait({self._exited})
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._endpoint.close()

    async def _read_to_end(self) -> None:
        """Drop the rest of the events: the engine waits until all of them are read."""
        with contextlib.suppress(EngineDied):
            while True:
                await self.receive()

    async def _send_start(self, start: EngineStart) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already: receive() reports that
            self._process.stdin.write(framed(start))
            await self._process.stdin.drain()

    async def _next_frame(self) -> tuple[bytes, bytes] | None:
        """Return the next message with its epoch; None once the engine has ended and all messages
        are read."""
        endpoint = self._endpoint
        while not endpoint.frames:
            has_ended = self._exited.done()
            if has_ended and (self._has_all_events or endpoint.is_at_end):
                return None
            if not has_ended:
                await endpoint.changed()
                continue
            try:
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await endpoint.changed()
            except TimeoutError:
                return None
        return endpoint.frames.popleft()


class _Endpoint:
    """A socket, the steps' marker and logits in a folder that no other user may enter."""

    def __init__(self) -> None:
        """Raises ConfigError if there is no place for it, OSError if no more files can be
        opened."""
        _require_files(_NUM_FILES)
        self._loop = asyncio.get_running_loop()
        self.frames: deque[tuple[bytes, bytes]] = deque()
        """Messages with their epochs that have come, and were not received yet."""
        self.is_at_end = False
        """Whether the engine has closed its end, so that nothing more comes."""
        self._waiting: asyncio.Future[None] | None = None
        """What its owner awaits."""
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        """Listens until the engine has connected, and then is the connection."""
        self._socket.setblocking(False)
        self._folder = PrivateFolder()
        self.marker_path = os.path.join(self._folder.path, "steps")
        self.logits_dir = os.path.join(self._folder.path, "logits")
        self.address = os.path.join(self._folder.path, "engine")
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    async def changed(self) -> None:
        """Wait until there may be something new: messages, or for its owner the engine's end."""
        self._waiting = self._loop.create_future()
        await self._waiting

    def wake(self) -> None:
        """End the wait of its owner."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def write(self, data: bytes = b"") -> None:
        """Write data as soon as the engine reads it, after what waits; none: what waits.

        Data for a dead engine is lost.
        """
        is_watched = bool(self._unsent)
        self._unsent += data
        if is_watched and data:
            return
        try:
            num_sent = self._socket.send(self._unsent)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            num_sent = len(self._unsent)
        del self._unsent[:num_sent]
        if self._unsent and not is_watched:
            self._loop.add_writer(self._socket, self.write)
        elif is_watched and not self._unsent:
            self._loop.remove_writer(self._socket)

    def close(self) -> None:
        self._stop_watching()
        self._socket.close()
        self._folder.remove()

    def _open(self) -> None:
        try:
            self.marker = create_marker_file(Path(self.marker_path))
            os.mkdir(self.logits_dir)
        except OSError as error:
            raise ConfigError(f"cannot write to {self._folder.path}: {error.strerror}") from error
        try:
            self._socket.bind(self.address)
        except OSError as error:
            raise ConfigError(
                f"cannot open {self.address}: {error}; TMPDIR may name another folder"
            ) from error
        self._socket.listen(1)
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it has died already
            return
        self._stop_watching()
        self._socket.close()
        self._socket = connection
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self.frames += self._reader.feed(data)
        else:
            self._stop_watching()
            self.is_at_end = True
        self.wake()

    def _stop_watching(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)


def _require_files(count: int) -> None:
    """Raise OSError if so many cannot be opened, while nothing has been started."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for number in opened:
            os.close(number)
