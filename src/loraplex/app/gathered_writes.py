"""Few large writes to a connection: each is a system call, and wakes the client."""

import asyncio
from collections.abc import Callable

_MAX_WAITING_BYTES = 64 * 1024


class GatheredWrites:
    """Transport that joins the writes of one turn of the event loop.

    A model's step brings a piece to every stream, and uvicorn writes a response's head and body
    apart. `flush` writes without waiting for the end of the turn.

    It aborts the connection of a client that does not read. The transport's protocol passes its
    calls on to `paused`, `resumed` and `lost`.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        unread_seconds: float,
        on_unread: Callable[[], None],
    ) -> None:
        """unread_seconds: how long writing may be paused, and how long the last bytes of a closed
        connection may take. on_unread: called when it took longer."""
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._unread_seconds = unread_seconds
        self._on_unread = on_unread
        self._timer: asyncio.TimerHandle | None = None
        self.is_closing = transport.is_closing
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._num_bytes = 0
            if not self._transport.is_closing():
                self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()
        self._start_timer()

    def paused(self) -> None:
        """More bytes wait in the transport than it takes at once."""
        self._start_timer()

    def resumed(self) -> None:
        """The client has read most of them."""
        self.lost()
        if self._transport.is_closing():
            self._start_timer()

    def lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is None and self._transport.get_write_buffer_size():
            self._timer = self._loop.call_later(self._unread_seconds, self._is_unread)

    def _is_unread(self) -> None:
        self._timer = None
        self._on_unread()
        self._transport.abort()
