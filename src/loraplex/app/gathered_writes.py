"""Writes to a connection, few and large: each is a system call, and wakes whoever reads."""

import asyncio

_MOST_WAITING = 64 * 1024
"""Bytes."""


class GatheredWrites(asyncio.Transport):
    """What is written in one turn of the event loop leaves in one piece, at the turn's end; sooner
    where that is asked for, and where it has become much."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview, *, at_once: bool = False) -> None:
        """at_once: with all that waits."""
        if at_once and not self._waiting:
            if not self.is_closing():
                self._transport.write(data)
            return
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(bytes(data))
        self._num_bytes += len(data)
        if at_once or self._num_bytes > _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Nothing does behind a flush or a close."""
        if not self._waiting:
            return
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        if not self.is_closing():
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._transport.close()
