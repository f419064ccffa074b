"""One connection to a serving process; responses arrive in a thread of its own.

It lives once. When it is lost, every in-flight request gets a RequestFailure, and `on_lost` is
called.
"""

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from .wire import (
    LENGTH,
    PROTOCOL,
    SILENCE_SECONDS,
    Cancel,
    FromServer,
    Infer,
    NotAMessage,
    Ping,
    RequestFailure,
    Response,
    Status,
    Welcome,
    frame,
    read_from_server,
)

Sink = Callable[[Response | RequestFailure], None]
"""Receives the responses to one request, in the connection's thread; it must not raise."""


class ConnectionLost(Exception):
    """The server has gone, or sent something unreadable; the message has the reason."""


class MessageTooLarge(Exception):
    """The server would not take it; the message has the limit."""


class Connection:
    """Any thread may call it."""

    def __init__(
        self,
        path: str,
        on_lost: Callable[[str], None],
        *,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Raises OSError if no server listens there, ConnectionLost for another program."""
        self._path = path
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self._state = threading.Condition()
        self._sinks: dict[int, Sink] = {}
        self._numbers = itertools.count(1)
        self._lost: str | None = None
        self._status: Status | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._limit_waits(silence_seconds)
            self._socket.connect(path)
            self._max_message_bytes = self._greeted()
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._read_all, name="loraplex-answers", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why it is of no use any more."""
        return self._lost

    def submit(self, request: Infer, sink: Sink) -> int:
        """Send a request; its number, which replaces the request's own, is for cancel().

        The sink gets every response, and exactly one end. Raises ConnectionLost or
        MessageTooLarge, and then the sink is given nothing.
        """
        number = next(self._numbers)
        message = frame(msgspec.structs.replace(request, id=number))
        if len(message) - LENGTH.size > self._max_message_bytes:
            raise MessageTooLarge(
                f"the request has {len(message) - LENGTH.size} bytes; the server takes at most "
                f"{self._max_message_bytes}"
            )
        with self._state:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            self._sinks[number] = sink
        self._send(message)
        return number

    def cancel(self, number: int) -> None:
        """The request ends with a RequestFailure, unless it has ended."""
        self._send(frame(Cancel(id=number)))

    def ping(self) -> None:
        """Request a Status: wait_for_status() returns it later."""
        with self._state:
            self._status = None
        self._send(frame(Ping()))

    def wait_for_status(self, timeout_seconds: float) -> Status | None:
        """Response to the last ping; None if there was none in time, or the server has gone."""
        with self._state:
            self._state.wait_for(
                lambda: self._status is not None or self._lost is not None, timeout_seconds
            )
            return self._status

    def close(self) -> None:
        """Close: in-flight requests fail; on_lost is not called. Idempotent."""
        self._lose("the model is unloaded", is_reported=False)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _limit_waits(self, seconds: float) -> None:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _greeted(self) -> int:
        try:
            welcome = self._read()
        except (OSError, EOFError, NotAMessage) as error:
            raise ConnectionLost(
                f"what listens on {self._path} is not a loraplex server: {error}"
            ) from error
        if not isinstance(welcome, Welcome) or welcome.protocol != PROTOCOL:
            raise ConnectionLost(
                f"the server at {self._path} speaks another version of the protocol: export the "
                "repository again with the loraplex that serves it"
            )
        return welcome.max_message_bytes

    def _send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(message)
        except ConnectionError:  # the reader learns it, too, perhaps later
            self._lose(f"the server at {self._path} has ended")
        except OSError as error:
            self._lose(f"the server at {self._path} takes no requests: {error.strerror}")

    def _read_all(self) -> None:
        try:
            while self._lost is None:
                self._take(self._read())
        except (EOFError, ConnectionError):  # a reset: it had not read all that was sent
            self._lose(f"the server at {self._path} has ended")
        except BlockingIOError:
            self._lose(f"the server at {self._path} has fallen silent")
        except (OSError, NotAMessage) as error:
            self._lose(f"the connection to the server at {self._path} broke: {error}")
        finally:
            with self._sending:  # the descriptor's number may be another file's by now
                self._socket.close()

    def _take(self, message: FromServer) -> None:
        if isinstance(message, Status):
            with self._state:
                self._status = message
                self._state.notify_all()
        elif isinstance(message, RequestFailure) and message.id is None:
            self._lose(f"the server at {self._path} closed the connection: {message.message}")
        elif isinstance(message, RequestFailure | Response):
            self._give(message)

    def _give(self, response: Response | RequestFailure) -> None:
        assert response.id is not None
        is_end = isinstance(response, RequestFailure) or response.is_final
        with self._state:
            sink = self._sinks.pop(response.id, None) if is_end else self._sinks.get(response.id)
        if sink is not None:
            sink(response)

    def _read(self) -> FromServer:
        """Raises EOFError, OSError, NotAMessage."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return read_from_server(self._exactly(length))

    def _exactly(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        view, start = memoryview(buffer), 0
        while start < num_bytes:
            received = self._socket.recv_into(view[start:])
            if received == 0:
                raise EOFError("it was closed")
            start += received
        return bytes(buffer)

    def _lose(self, reason: str, *, is_reported: bool = True) -> None:
        with self._state:
            if self._lost is not None:
                return
            self._lost = reason
            sinks, self._sinks = self._sinks, {}
            self._state.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        for number, sink in sinks.items():
            sink(RequestFailure(id=number, kind="UNAVAILABLE", message=reason))
        if is_reported:
            self._on_lost(reason)
