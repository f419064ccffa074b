"""Channels that carry commands to an engine's loop and events from it, by thread or socket.

The loop is the only reader and the only writer, so a channel needs no locks of its own.
"""

import math
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from loraplex.engine.messages import (
    ConfirmEvents,
    EngineCommand,
    EngineEnded,
    EngineEvent,
    decode_command,
    encode,
)
from loraplex.engine.step_marker import StepMarker

EPOCH_BYTES = 8


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


class SocketChannel:
    """Channel of an engine in its own process: a ZeroMQ DEALER. Frames: epoch, message."""

    def __init__(
        self,
        endpoint: str,
        epoch: int,
        marker: StepMarker | None = None,
        logits_dir: Path | None = None,
    ) -> None:
        self.marker = marker or StepMarker()
        self.logits_dir = logits_dir
        self._epoch = epoch.to_bytes(EPOCH_BYTES, "big")
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        # No high-water mark: a slow reader must never hold a step back.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)  # close() waits for the reader instead
        self._socket.connect(endpoint)

    def receive(self, timeout_seconds: float | None) -> EngineCommand | None:
        # Rounded up: a poll of 0 ms that comes back too early would make the loop spin.
        timeout_ms = None if timeout_seconds is None else max(0, math.ceil(timeout_seconds * 1000))
        while self._socket.poll(timeout_ms):
            epoch, payload = self._socket.recv_multipart()
            if epoch == self._epoch:
                return decode_command(payload)
        return None

    def send(self, event: EngineEvent) -> None:
        self._socket.send_multipart([self._epoch, encode(event)])

    def close(self) -> None:
        """Wait until serving confirms that it has all events, then close the socket.

        There is no limit of time, since a busy machine may need any. Serving that awaits no more
        events ends this process, and so does its own end.
        """
        if self._socket.closed:
            return
        self.send(EngineEnded())
        while not isinstance(self.receive(None), ConfirmEvents):
            pass  # a command that came too late
        self._socket.close()
        self._context.term()
