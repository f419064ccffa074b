"""One HTTP request and its answer: the body for the application, what it sends in bytes."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from loraplex.app.gathered_writes import GatheredWrites
from loraplex.core.errors import LoraplexError

_HEADERS = re.compile(rb"[^\r\n]*(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [^\x00-\x08\x0a-\x1f\x7f]*)*")
"""A status line, and lines that are headers."""
_STATUS_LINES = {status: line.rstrip() for status, line in STATUS_LINE.items()}
_WITHOUT_BODY = (204, 304)


class Exchange(RequestResponseCycle):
    """uvicorn's, but for how the body is waited for, and for the answer's bytes."""

    transport: GatheredWrites
    logger = logging.getLogger("uvicorn.error")
    _num_owed: int | None = None
    """Bytes of the answer's body still to come; None: nobody said."""
    _is_chunked = False
    _is_bodiless = False

    def __init__(
        self,
        scope: Any,
        transport: GatheredWrites,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        *,
        expect_100_continue: bool,
        keep_alive: bool,
        on_response: Callable[[], None],
    ) -> None:
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.default_headers = default_headers
        self.waiting_for_100_continue = expect_100_continue
        self.keep_alive = keep_alive
        self.on_response = on_response
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        """Of the pieces."""
        self._has_end = False
        """Of the body."""
        self._has_told_end = False
        self._failure: LoraplexError | None = None
        """Why the rest of the body is not read."""
        self._news: asyncio.Event | None = None
        """For who waits; mostly nobody has to."""

    # ---------------------------------------------------------------- what the connection says

    def take(self, piece: bytes) -> None:
        """A part of the body; no more is read while there is much of it."""
        if self.response_complete:
            return
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self._wake()

    def take_end(self) -> None:
        """The body is there as a whole."""
        self._has_end = True
        self._wake()

    def give_up(self, error: LoraplexError) -> None:
        """The rest of the body is not waited for."""
        self._failure = error
        self._wake()

    def disconnect(self) -> None:
        """The client has gone."""
        self.disconnected = True
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    # ---------------------------------------------------------------- what the application asks

    async def receive(self) -> Any:
        """Raises why the rest of the body is not read, once all that came is told."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.disconnected or self.response_complete):
            self.flow.resume_reading()
            if self._pieces or self._has_end > self._has_told_end:
                body = b"".join(self._pieces)
                self._pieces.clear()
                self._num_bytes = 0
                self._has_told_end = self._has_end
                return {"type": "http.request", "body": body, "more_body": not self._has_end}
            if self._failure is not None and not self._has_end:
                # Nor is what comes behind it.
                self.keep_alive = False
                raise self._failure
            if self._news is None:
                self._news = asyncio.Event()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """An ASGI message. Raises RuntimeError for one that does not fit what was sent before."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.response_started else "http.response.start"
        if self.response_complete or message["type"] != expected:
            raise RuntimeError(f"the application sent {message['type']} out of turn")
        if self.response_started:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            self._send_head(message["status"], message.get("headers", ()))

    def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        lines, num_bytes = [_STATUS_LINES[status]], None
        # Who was not told to go on may send the body next, or another request: nobody can tell.
        keeps_alive = self.keep_alive and (self._has_end or not self.waiting_for_100_continue)
        for name, value in [*self.default_headers, *headers]:
            lower = name.lower()
            if lower == b"content-length":
                num_bytes = int(value)
            elif lower == b"connection" and b"close" in value.lower():
                keeps_alive = False
                continue
            lines.append(b"%b: %b" % (lower, value))
        is_bodiless = self.scope["method"] == "HEAD" or status in _WITHOUT_BODY
        # HTTP/1.0 has no chunks: there the connection's end is the answer's.
        is_chunked = num_bytes is None and not is_bodiless and self.scope["http_version"] != "1.0"
        if is_chunked:
            lines.append(b"transfer-encoding: chunked")
        if not keeps_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        # What an application repeats of a request begins no header of its own: it would be counted.
        if _HEADERS.fullmatch(head) is None or head.count(b"\r\n") != len(lines) - 1:
            raise RuntimeError(f"the application sent headers that are none: {lines!r}")
        self._num_owed, self._is_chunked, self._is_bodiless = num_bytes, is_chunked, is_bodiless
        self.keep_alive = keeps_alive
        self.response_started = True
        self.waiting_for_100_continue = False
        # With the first piece if that comes in this turn; who streams may have none for minutes.
        self.transport.write(head + b"\r\n\r\n")

    def _send_body(self, piece: bytes, *, is_last: bool) -> None:
        if self._is_bodiless:
            piece = b""
        elif self._is_chunked:
            piece = (b"%x\r\n%b\r\n" % (len(piece), piece)) if piece else b""
            piece += b"0\r\n\r\n" if is_last else b""
        elif self._num_owed is not None:
            self._num_owed -= len(piece)
            if self._num_owed < 0 or (is_last and self._num_owed > 0):
                raise RuntimeError("the answer is not as long as its content-length")
        self.transport.write(piece, at_once=is_last)
        if is_last:
            self.response_complete = True
            self._wake()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
