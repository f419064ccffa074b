"""Messages over a stream socket: four bytes of length, then msgpack.

The end of the connection is the death of the other process: the kernel reports it at once.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

import msgspec

Received = TypeVar("Received")
_LENGTH_BYTES: Final = 4
_encode = msgspec.msgpack.Encoder().encode


class FrameConnection(asyncio.Protocol, Generic[Received]):
    """One end of a connection. What is sent in one turn of the event loop is one write."""

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Received]",
        on_message: Callable[[Received], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytes] = []

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. One for a process that has ended is lost."""
        data = _encode(message)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (len(data).to_bytes(_LENGTH_BYTES, "big"), data)

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance: uvloop's transport is no asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        received, start = self._received, 0
        received += data
        while (body := start + _LENGTH_BYTES) <= len(received):
            end = body + int.from_bytes(received[start:body], "big")
            if end > len(received):
                break
            message, start = self._decode(memoryview(received)[body:end].toreadonly()), end
            self._on_message(message)
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._on_lost()

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if data and self._transport is not None:
            self._transport.write(data)
