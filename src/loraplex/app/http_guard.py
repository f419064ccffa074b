"""Guard around uvicorn's HTTP protocol: limits that uvicorn does not have.

uvicorn limits neither the size of a request head nor the time that a client may take for a head, a
body or the response, and reads pipelined requests without a limit. A `ConnectionGuard` stands
between the transport and uvicorn's protocol. It parses the same bytes, refuses what exceeds a limit
with a JSON error, and passes on one request at a time. `GuardedApp` stands between uvicorn and the
application and reports the end of each response to the guard of its connection.
"""

import asyncio
import http
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.errors import BodyTimeoutError, LoraplexError, NotReadyError
from loraplex.frontends.body_limits import UPLOADS_PREFIX
from loraplex.frontends.direct_writes import DIRECT
from loraplex.frontends.long_json import SENT_BYTES, parts_of
from loraplex.frontends.telemetry.connections import HttpConnections

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
        self.is_flushed = False
        """Whether `flush` follows what is written now, in this turn."""
        self.is_closing = transport.is_closing
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        if not self._waiting and not self.is_flushed:
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


_VERSIONS = ("1.0", "1.1")
_INVALID = "invalid_request"

Headers = Sequence[tuple[bytes, bytes]]
"""Headers of a request; names are in lower case."""


class Rejection(NamedTuple):
    """Error that ends a connection before an application has handled the request."""

    status: int
    code: str
    message: str

    def response(self) -> bytes:
        """Return the whole HTTP response."""
        is_client_error = self.status != 503
        error = {
            "message": self.message,
            "type": "invalid_request_error" if is_client_error else "service_unavailable_error",
            "param": None,
            "code": self.code,
        }
        body = msgspec.json.encode({"error": error})
        retry = "" if is_client_error else "retry-after: 1\r\n"
        head = (
            f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
            "connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body


class ConnectionLimits(NamedTuple):
    """Limits of the connections of one port."""

    max_connections: int
    max_headers: int
    max_header_bytes: int
    max_request_line_bytes: int
    header_timeout_seconds: float
    body_timeout_seconds: float

    def exceeded(self, code: str) -> Rejection:
        """Return the error of a client that exceeds one of the limits."""
        status, message = _EXCEEDED[code]
        return Rejection(status, code, message.format(**self._asdict()))


_EXCEEDED: Final[Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "request_line_too_long": (414, "the request line is over {max_request_line_bytes} bytes"),
        "headers_too_large": (431, "request line and headers are over {max_header_bytes} bytes"),
        "too_many_headers": (431, "there are over {max_headers} headers"),
        "too_many_connections": (503, "{max_connections} connections are open"),
        "header_timeout": (
            408,
            "the headers did not come within {header_timeout_seconds:g} seconds",
        ),
    }
)
"""Status and message by code."""


def refusal_of_head(
    method: bytes, url: bytes, version: str, headers: Headers, limits: ConnectionLimits
) -> Rejection | None:
    """Check a request head that the parser has accepted; return what is wrong with it.

    This covers the limits, and heads that another HTTP parser, such as that of a proxy in front of
    this server, could read as a different request (RFC 9112, 3.2 and 6.1).
    """
    line_bytes = len(method) + len(url) + len("  HTTP/1.1")
    if line_bytes > limits.max_request_line_bytes:
        return limits.exceeded("request_line_too_long")
    if len(headers) > limits.max_headers:
        return limits.exceeded("too_many_headers")
    num_bytes = sum(map(len, itertools.chain.from_iterable(headers)))
    if line_bytes + num_bytes + 4 * len(headers) > limits.max_header_bytes:
        return limits.exceeded("headers_too_large")
    if version not in _VERSIONS:
        return Rejection(505, _INVALID, f"HTTP/{version} is not supported")
    names = [name for name, _ in headers]
    num_hosts = names.count(b"host")
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return Rejection(400, _INVALID, f"there are {num_hosts} host headers instead of one")
    if method == b"CONNECT":
        return Rejection(400, _INVALID, "CONNECT is for proxies")
    codings = {v.lower() for name, v in headers if name == b"transfer-encoding"}
    if codings - {b"chunked"}:
        return Rejection(501, _INVALID, "the only supported transfer-encoding is chunked")
    return None


_END = b"\r\n\r\n"
"""End of every head, and of every chunked body: the parser accepts no other line ends."""
_BLANKS = b" \t"
_LINE_END = b"\r\n"
_CLOSE = (b"connection", b"close")
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_MAX_EARLY_BYTES = 64 * 1024
"""Bytes read after a request in progress. Reading goes on so that a disconnect is noticed."""
_PROGRESS_BYTES = 1 << 20
"""Bytes of an upload that must come within the time limit of other bodies."""
_STATE_KEY = "connection_guard"


class ConnectionGuard(asyncio.Protocol):
    """One connection: checks the bytes of a client before uvicorn's protocol reads them."""

    def __init__(
        self,
        protocol_class: Callable[..., asyncio.Protocol],
        limits: ConnectionLimits,
        counts: HttpConnections,
        guards: "dict[ConnectionGuard, None]",
        **arguments: Any,
    ) -> None:
        """Create a guard for uvicorn's server.

        `guards` holds the open connections of a port, oldest first. `arguments` are those of
        `protocol_class`; uvicorn copies `app_state` into the scope of each request, where
        GuardedApp finds the guard.
        """
        self._app_state = {**arguments.pop("app_state"), _STATE_KEY: self}
        self._arguments = arguments
        self._protocol_class = protocol_class
        self._limits, self._counts, self._guards = limits, counts, guards
        self._loop = asyncio.get_running_loop()
        self._protocol = asyncio.Protocol()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._url, self.headers = b"", list[tuple[bytes, bytes]]()
        self._head = bytearray()
        """Bytes of an incomplete head."""
        self._early = b""
        """Bytes that came after a request in progress."""
        self._refusal: Rejection | None = None
        self._is_in_body = False
        self._num_body_bytes = 0
        """Bytes left of a body with a known length."""
        self._num_idle_bytes = 0
        """Bytes of a chunked body since its last content: chunk extensions and trailers."""
        self._num_recent_bytes = 0
        """Bytes of a body since its timer started."""
        self._tail = b""
        """Last bytes of a chunked body, in which its end may have begun."""
        self._is_in_progress = False
        """The application handles a request."""
        self._has_response = False
        """The application has begun its response."""
        self._failure: LoraplexError | None = None
        """Why the rest of the body is not waited for."""
        self._waiting: asyncio.Timeout | None = None
        """Around an application's wait for the body."""
        self._is_paused = False
        """More bytes wait in the transport than it takes at once."""
        self._send: Send | None = None
        """uvicorn's, for the current request."""

    # ---------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = GatheredWrites(
            transport,
            self._loop,
            self._limits.body_timeout_seconds,
            lambda: self._counts.refused("unread"),
        )
        self._guards[self] = None
        self._counts.num_open += 1
        if len(self._guards) > self._limits.max_connections:
            idle = self._longest_idle()
            if idle is None:
                self._refuse(self._limits.exceeded("too_many_connections"))
                return
            idle.make_way()
        self._protocol = self._protocol_class(app_state=self._app_state, **self._arguments)
        self._protocol.connection_made(self.transport)  # type: ignore[arg-type]
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guards.pop(self, None)
        self._counts.num_open -= 1
        self._stop_timer()
        self.transport.lost()
        self._parser = None  # it refers to this object
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._early or (self._is_in_progress and not self._is_in_body):
            self._early += data
            if len(self._early) > _MAX_EARLY_BYTES:
                self.transport.pause_reading()
        else:
            self._read(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._is_paused = True
        self.transport.paused()
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_paused = False
        self.transport.resumed()
        self._protocol.resume_writing()

    @property
    def is_idle(self) -> bool:
        """Whether the client waits for nothing: it has sent no part of a request."""
        is_used = self._is_in_progress or self._is_in_body or self._head or self._early
        return not is_used and not self.transport.is_closing()

    def make_way(self) -> None:
        """Close an idle connection for another one."""
        self._counts.refused("idle")
        self._stop_timer()
        self.transport.close()

    def _longest_idle(self) -> "ConnectionGuard | None":
        """Return the connection to close for this one: one without any request, if there is one."""
        idle = [guard for guard in self._guards if guard is not self and guard.is_idle]
        return next((guard for guard in idle if not guard._has_response), next(iter(idle), None))

    def stop(self) -> None:
        """Stop waiting for the rest of a body, because the server stops."""
        if self._is_in_body:
            self._fail(NotReadyError("the server is stopping", retry_after_seconds=1))

    # ---------------------------------------------------------------- reading

    def _read(self, data: bytes) -> None:
        """Pass on at most one request, and keep the bytes after it."""
        head = b""
        if not self._is_in_body:
            self._head += data
            head, data = self._take_head()
            head = self._checked(head)
            if not head:
                return
        size = 0
        while self._is_in_body and size < len(data):
            end = size + self._next_size(data[size:] if size else data)
            if not self._parse(data[size:end]):
                return
            size = end
        if self._is_in_body and self._timer is None:
            self._start_timer(self._limits.body_timeout_seconds, self._body_is_late)
        self._protocol.data_received(head + data[:size])
        self._early = data[size:]
        if self._early and not self._is_in_progress:
            self._read_early()

    def _read_early(self) -> None:
        if not self.transport.is_closing():
            data, self._early = self._early, b""
            self.transport.resume_reading()
            self._read(data)

    def _take_head(self) -> tuple[bytes, bytes]:
        """Return a whole head and the bytes after it; nothing while the head is incomplete."""
        while self._head.startswith((b"\r", b"\n")):  # empty lines: RFC 9112, 2.2
            del self._head[0]
        end = self._head.find(_END) + len(_END)
        if end >= len(_END):
            data, self._head = bytes(self._head), bytearray()
            return data[:end], data[end:]
        if len(self._head) > self._limits.max_header_bytes:
            is_line_long = self._head.find(_LINE_END) < 0
            code = "request_line_too_long" if is_line_long else "headers_too_large"
            self._refuse(self._limits.exceeded(code))
        elif self._head and self._timer is None:
            self._await_head()
            self._protocol.data_received(_LINE_END)  # ends uvicorn's keep-alive timeout
        return b"", b""

    def _checked(self, head: bytes) -> bytes:
        """Return the head that uvicorn may read; nothing if there is none or it is refused."""
        if not head:
            return b""
        self._stop_timer()
        self._failure, self._has_response = None, False
        self._num_body_bytes, self._num_idle_bytes, self._tail = 0, 0, b""
        self._num_recent_bytes = 0
        if not self._parse(head):
            return b""
        if self._parser.should_upgrade():
            # The parser ignores the body of a request that offers another protocol, as Java's
            # client offers HTTP/2. A server may ignore the offer instead: RFC 9110, 7.8.
            head = _UPGRADE.sub(b"", head)
            self._parse(head)
        self._is_in_progress = True
        return head

    def _next_size(self, data: bytes) -> int:
        """Return how many bytes of a body can be parsed without going beyond its end."""
        if self._num_body_bytes:
            return self._num_body_bytes
        recent = self._tail + data
        start = recent.find(_END)
        if start < 0:
            self._tail = recent[1 - len(_END) :]
            return len(data)
        size = start + len(_END) - len(self._tail)
        self._tail = b""
        return size

    def _parse(self, data: bytes) -> bool:
        """Feed the parser; return whether the connection goes on."""
        self._num_idle_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            not_http = Rejection(400, _INVALID, f"this is not HTTP: {error}")
            self._refuse(self._refusal or not_http)
            return False
        if self._refusal is not None:
            self._refuse(self._refusal)
            return False
        if self._is_in_body and self._num_idle_bytes > self._limits.max_header_bytes:
            self._refuse(self._limits.exceeded("headers_too_large"))
            return False
        return True

    # ---------------------------------------------------------------- the parser's callbacks

    def on_message_begin(self) -> None:
        self._url, self.headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_body:  # a trailer must not be read as a header: nothing has checked it
            name = name.lower()
            if name == b"content-length":
                self._num_body_bytes = int(value)
            self.headers.append((name, value.rstrip(_BLANKS)))

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._num_idle_bytes = 0
        method, version = self._parser.get_method(), self._parser.get_http_version()
        self._refusal = refusal_of_head(method, self._url, version, self.headers, self._limits)

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        self._num_recent_bytes += len(body)
        if self._num_body_bytes:
            self._num_body_bytes -= len(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._stop_timer()
        if not self._is_in_progress and self._has_response:
            self._await_head()  # uvicorn's keep-alive timeout ended with the rest of the body

    # ---------------------------------------------------------------- limits

    def _await_head(self) -> None:
        self._start_timer(self._limits.header_timeout_seconds, self._head_is_late)

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._head:
            self._refuse(self._limits.exceeded("header_timeout"))
        else:
            self._counts.refused("idle")
            self.transport.close()

    def _body_is_late(self) -> None:
        self._timer = None
        seconds = self._limits.body_timeout_seconds
        is_upload = self._parser.get_method() == b"PUT" and self._url.startswith(UPLOADS_PREFIX)
        if is_upload and not self._has_response and self._num_recent_bytes >= _PROGRESS_BYTES:
            self._num_recent_bytes = 0
            self._start_timer(seconds, self._body_is_late)
            return
        self._fail(BodyTimeoutError(f"the request body did not come within {seconds:g} seconds"))

    def _fail(self, error: LoraplexError) -> None:
        """Report an error to the application instead of the rest of the body."""
        if self._failure is not None:
            return
        self._failure = error
        if not self._is_in_progress:
            self.transport.close()
        elif self._waiting is not None:
            self._waiting.reschedule(self._loop.time())

    def _refuse(self, refusal: Rejection) -> None:
        """Respond and close. The bytes are written here: there may be no application to do so."""
        self._counts.refused(refusal.code)
        if not (self._is_in_progress and self._has_response):
            self.transport.write(refusal.response())
        self.transport.close()

    # ---------------------------------------------------------------- the application

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for the current request."""
        is_held_back = (b"expect", b"100-continue") in self.headers

        async def guarded_receive() -> Message:
            nonlocal is_held_back
            is_held_back = False
            if not self._is_in_body:
                return await receive()
            try:
                async with asyncio.timeout(None if self._failure is None else 0) as self._waiting:
                    return await receive()
            except TimeoutError:
                if self._failure is None:
                    raise
                raise self._failure from None
            finally:
                self._waiting = None

        def guarded_send(message: Message) -> Awaitable[None]:
            if not self._has_response:
                self._has_response = True
                # A client that did not get a 100 may send the body or another request.
                if self._is_in_body and (is_held_back or self._failure is not None):
                    message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            if len(message.get("body", b"")) > SENT_BYTES:
                return _send_in_parts(message, send)
            return send(message)

        scope["headers"] = self.headers  # without trailers, which uvicorn appends to its own
        self._send, scope[DIRECT] = send, self
        try:
            await app(scope, guarded_receive, guarded_send)
        finally:
            self._is_in_progress, self._send = False, None
            self.transport.flush()
            if self._early:
                self._loop.call_soon(self._read_early)

    @property
    def is_writable(self) -> bool:
        """Implements DirectWriter."""
        return self._send is not None and not self._is_paused and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Implements DirectWriter."""
        assert self._send is not None, "written after the end of the response"
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        # uvicorn waits for nothing while writing is not paused: no task has to await it.
        self.transport.is_flushed = True
        try:
            for _ in sending.__await__():
                raise RuntimeError("the server waits though the client reads")
        finally:
            self.transport.is_flushed = False
            self.transport.flush()


async def _send_in_parts(message: Message, send: Send) -> None:
    """Send a long body as the client reads it: what it does not read is not in the transport."""
    *parts, last = parts_of([message["body"]])
    for part in parts:
        await send({**message, "body": part, "more_body": True})
        await asyncio.sleep(0)  # a client that reads fast would keep the event loop busy
    await send({**message, "body": last})


class GuardedApp:
    """ASGI application that reports to the guard of its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        guard: ConnectionGuard = scope["state"].pop(_STATE_KEY)
        return guard.run(self._app, scope, receive, send)
