"""Channels that carry commands to an engine's loop and events from it, by thread or socket.

The loop is the only reader and the only writer, so a channel needs no locks of its own.
"""

import contextlib
import math
import queue
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from loraplex.engine.messages import (
    ConfirmEvents,
    EngineCommand,
    EngineEnded,
    EngineEvent,
    decode_command,
    encode,
)
from loraplex.engine.step_marker import StepMarker

EPOCH_BYTES: Final = 8
FRAME_HEAD: Final = struct.Struct(f">I{EPOCH_BYTES}s")
"""What precedes a message on a socket: its length in bytes, and the engine's epoch."""
READ_BYTES: Final = 256 << 10
"""Maximum number of bytes that are read from a socket at a time."""


class EngineChannel(Protocol):
    """The engine's end of the connection to serving."""

    @property
    def marker(self) -> StepMarker:
        """Marker of the requests that the engine's steps in flight compute."""
        ...

    @property
    def logits_dir(self) -> Path | None:
        """Folder for logits that requests return; None: none. It ends with the link."""
        ...

    def receive(self, timeout_seconds: float | None) -> EngineCommand | None:
        """Return the next command; None after timeout_seconds without one.

        timeout_seconds None waits for ever.
        """
        ...

    def send(self, event: EngineEvent) -> None:
        """Send an event; never blocks the step."""
        ...


class ThreadChannel:
    """Channel of an engine in a thread of the same process."""

    def __init__(
        self, deliver: Callable[[EngineEvent], None], logits_dir: Path | None = None
    ) -> None:
        self._inbox: queue.SimpleQueue[EngineCommand] = queue.SimpleQueue()
        self._deliver = deliver
        self.marker = StepMarker()
        self.logits_dir = logits_dir

    def put(self, command: EngineCommand) -> None:
        """Enqueue a command; may be called from any thread."""
        self._inbox.put(command)

    def receive(self, timeout_seconds: float | None) -> EngineCommand | None:
        try:
            if timeout_seconds is not None and timeout_seconds <= 0:
                return self._inbox.get_nowait()
            return self._inbox.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def send(self, event: EngineEvent) -> None:
        self._deliver(event)


class FrameReader:
    """Splits what a stream socket brings into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (epoch, message) of each frame that is whole with these bytes."""
        self._received += data
        start = 0
        while (body := start + FRAME_HEAD.size) <= len(self._received):
            length, epoch = FRAME_HEAD.unpack_from(self._received, start)
            end = body + length
            if end > len(self._received):
                break
            yield epoch, bytes(self._received[body:end])
            start = end
        del self._received[:start]


class _Sender:
    """Writes to a socket, and never waits: what it does not take at once a thread writes later."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []
        """Data that waits for the thread; the first one is being written."""

    def send(self, data: bytes) -> None:
        """Write data, or queue it. Data for a process that has ended is lost."""
        with self._lock:
            if self._unsent:
                self._unsent.append(data)
                return
            try:
                num_sent = self._connection.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                num_sent = 0
            except OSError:
                return
            if num_sent < len(data):
                self._unsent.append(data[num_sent:])
                threading.Thread(target=self._send_rest, daemon=True).start()

    def _send_rest(self) -> None:
        """Write what waits, as the reader takes it, until nothing does."""
        is_lost = False
        while True:
            data = self._unsent[0]
            try:
                if not is_lost:
                    self._connection.sendall(data)
            except OSError:
                is_lost = True
            with self._lock:
                del self._unsent[0]
                if not self._unsent:
                    return


class SocketChannel:
    """Channel of an engine in its own process: a Unix stream socket."""

    def __init__(
        self,
        address: str,
        epoch: int,
        marker: StepMarker | None = None,
        logits_dir: Path | None = None,
    ) -> None:
        """address: the path of serving's socket."""
        self.marker = marker or StepMarker()
        self.logits_dir = logits_dir
        self._epoch = epoch.to_bytes(EPOCH_BYTES, "big")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._sender = _Sender(self._socket)
        self._reader = FrameReader()
        self._commands: deque[EngineCommand] = deque()
        """Commands that have come, and were not received yet."""
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def receive(self, timeout_seconds: float | None) -> EngineCommand | None:
        # Rounded up: a poll of 0 ms that comes back too early would make the loop spin.
        timeout_ms = None if timeout_seconds is None else max(0, math.ceil(timeout_seconds * 1000))
        while not self._commands:
            if not self._poll.poll(timeout_ms):  # mostly: to read nothing would raise
                return None
            try:
                data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError:
                data = b""
            if not data:
                # Serving has gone, and this process ends with it. Until then this waits in vain.
                with contextlib.suppress(KeyError):
                    self._poll.unregister(self._socket)
                return None
            frames = self._reader.feed(data)
            self._commands += (decode_command(m) for epoch, m in frames if epoch == self._epoch)
        return self._commands.popleft()

    def send(self, event: EngineEvent) -> None:
        message = encode(event)
        self._sender.send(FRAME_HEAD.pack(len(message), self._epoch) + message)

    def close(self) -> None:
        """Wait until serving confirms that it has all events, then close the socket.

        There is no limit of time, since a busy machine may need any. Serving that awaits no more
        events ends this process, and so does its own end.
        """
        if self._socket.fileno() < 0:
            return
        self.send(EngineEnded())
        while not isinstance(self.receive(None), ConfirmEvents):
            pass  # a command that came too late
        self._socket.close()
