"""One HTTP request and its answer: what the application sends, in bytes."""

import re
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from loraplex.app.gathered_writes import GatheredWrites

_HEADERS = re.compile(rb"[^\r\n]*(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [^\x00-\x08\x0a-\x1f\x7f]*)*")
"""A status line, and lines that are headers."""
_STATUS_LINES = {status: line.rstrip() for status, line in STATUS_LINE.items()}
_WITHOUT_BODY = (204, 304)


class Exchange(RequestResponseCycle):
    """uvicorn's, but for the answer's bytes."""

    transport: GatheredWrites
    _num_owed: int | None = None
    """Bytes of the answer's body still to come; None: nobody said."""
    _is_chunked = False
    _is_bodiless = False

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
        lines, num_bytes, keeps_alive = [_STATUS_LINES[status]], None, self.keep_alive
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
        self.transport.write(head + b"\r\n\r\n")

    def _send_body(self, piece: bytes, *, is_last: bool) -> None:
        if not self._is_bodiless:
            if self._is_chunked:
                piece = (b"%x\r\n%b\r\n" % (len(piece), piece)) if piece else b""
                piece += b"0\r\n\r\n" if is_last else b""
            elif self._num_owed is not None:
                self._num_owed -= len(piece)
                if self._num_owed < 0 or (is_last and self._num_owed > 0):
                    raise RuntimeError("the answer is not as long as its content-length")
            self.transport.write(piece)
        if is_last:
            self.transport.flush()
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
