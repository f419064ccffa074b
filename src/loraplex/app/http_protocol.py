"""One HTTP connection with limits: what uvicorn's own protocol takes without any.

Header lines, their number and bytes, and the time until they are there; a connection beyond those
that may be open; one request at a time. Who breaks one is answered with a status and a JSON error,
and the connection is closed: no application has seen the request, so the answer is not in a front
end's words.
"""

import asyncio
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loraplex.app.gathered_writes import GatheredWrites
from loraplex.app.http_exchange import Exchange
from loraplex.app.http_refusals import (
    ConnectionLimits,
    Head,
    Refusal,
    Refused,
    body_of,
    not_http,
)
from loraplex.frontends.telemetry.connections import HttpConnections

_END = b"\r\n\r\n"
"""Every head ends so, and every body in chunks: the parser takes no other line ends."""
_BLANKS = b" \t"
"""No part of a header's value; the parser leaves those behind it."""


class LimitedConnection(HttpToolsProtocol):
    """Made for each connection by uvicorn's server, with our first arguments bound."""

    def __init__(
        self,
        limits: ConnectionLimits,
        counts: HttpConnections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._counts = counts
        self._flow: _Flow
        self._writes: GatheredWrites
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        """Between a head and the end of its request; there is not always a body."""
        self._num_body_bytes = 0
        """Of a body with a known length, what is still to come."""
        self._num_pending = 0
        """Bytes since the parser had something whole."""
        self._tail = b""
        """The last bytes that were read, where an _END may have begun."""
        self._early = b""
        """What came behind a request that is not answered yet."""

    # ---------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._writes = GatheredWrites(transport, self.loop)
        self._counts.num_open += 1
        if len(self.connections) > self._limits.max_connections:
            self._refuse(self._limits.too_many_connections())
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.num_open -= 1
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering():
            self._keep(self._early + data)
        else:
            self._read(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._early and not self.transport.is_closing():
            early = self._early
            self._keep(b"")
            self._read(early)

    def _is_answering(self) -> bool:
        """A request is here as a whole, and its answer is not yet there."""
        return self.cycle is not None and not (self._is_in_body or self.cycle.response_complete)

    def _keep(self, early: bytes) -> None:
        self._early = early
        self._flow.hold(is_held=bool(early))

    # ---------------------------------------------------------------- reading

    def _read(self, data: bytes) -> None:
        """Feed the parser, never beyond the end of a request: one at a time is answered."""
        while data:
            size = self._next_size(data)
            if not self._feed(data[:size]):
                return
            data = data[size:]
            if data and self._is_answering():
                self._keep(data)
                return
        if self._num_pending and not self._is_in_body:
            self._await_headers()

    def _next_size(self, data: bytes) -> int:
        """How many of these bytes may be fed, so that a request ends with them or later."""
        if self._num_body_bytes:
            return self._num_body_bytes
        seen = self._tail + data
        start = seen.find(_END)
        if start < 0:
            self._tail = seen[1 - len(_END) :]
            return len(data)
        size = start + len(_END) - len(self._tail)
        self._tail = b""
        return size

    def _feed(self, data: bytes) -> bool:
        """Whether the connection goes on."""
        self._num_pending += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return self._feed(self._head_without_upgrade())
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(reason.refusal if isinstance(reason, Refused) else not_http(error))
            return False
        if self._num_pending > self._limits.max_header_bytes:
            has_long_line = len(self.url) > self._limits.max_request_line_bytes
            limits = self._limits
            self._refuse(limits.line_too_long() if has_long_line else limits.headers_too_large())
            return False
        return True

    def _head_without_upgrade(self) -> bytes:
        """To go on in HTTP/1, as a server may: the parser takes what follows the head for
        another protocol, even a body with a length.
        """
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join([*lines, b"\r\n"])

    # ---------------------------------------------------------------- what the parser has read

    def on_message_begin(self) -> None:
        assert not self._is_answering()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # One behind the body is none: the application has the headers, and nobody checked it.
        if not self._is_in_body:
            self.headers.append((name.lower(), value.rstrip(_BLANKS)))

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        head = Head(method, self.url, version, self.headers)
        body = body_of(head, self._limits)
        if self.parser.should_upgrade():
            return  # The head is read again.
        self._stop_waiting()
        self._unset_keepalive_if_required()
        self._is_in_body = True
        self._num_pending, self._num_body_bytes = 0, body.num_bytes
        self._complete_scope(method, version)
        self.cycle = Exchange(
            scope=self.scope,
            transport=self._writes,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=body.is_held_back,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self._start_asgi_task(self.cycle, self.app)

    def _complete_scope(self, method: bytes, version: str) -> None:
        target = httptools.parse_url(self.url)
        raw_path = target.path or b"/"
        path = raw_path.decode("ascii")
        scope = self.scope
        scope["method"] = method.decode("ascii")
        scope["http_version"] = version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = target.query or b""

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        if self._num_body_bytes:
            self._num_body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_in_body:
            self._is_in_body = False
            self._num_pending = 0
            super().on_message_complete()

    # ---------------------------------------------------------------- refusing

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._unset_keepalive_if_required()
            seconds = self._limits.header_timeout_seconds
            self._header_timer = self.loop.call_later(seconds, self._headers_are_late)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self._num_pending:
            self._refuse(self._limits.headers_are_late())
        else:
            self._counts.refused("idle")
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and close. The bytes are written here: no application may be there to."""
        self._counts.refused(refusal.code)
        if self.cycle is not None and not self.cycle.response_complete:
            # A broken body: its application is told as if the client had gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        self.transport.write(refusal.answer())
        self.transport.close()


class _Flow(FlowControl):
    """Nothing is read while bytes wait here: a client could have any number of them kept."""

    _is_held = False

    def hold(self, *, is_held: bool) -> None:
        self._is_held = is_held
        if is_held:
            self.pause_reading()
        else:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self._is_held:
            super().resume_reading()
