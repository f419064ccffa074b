"""Few large writes to a connection: each is a system call, and wakes the client."""

import asyncio

_MAX_WAITING_BYTES = 64 * 1024


class GatheredWrites:
    """Transport that joins the writes of one turn of the event loop.

    A model's step brings a piece to every stream, and uvicorn writes a response's head and body
    apart. `flush` writes without waiting for the end of the turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._num_bytes = 0
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
