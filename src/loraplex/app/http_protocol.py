"""One HTTP connection with limits: what uvicorn's own protocol takes without any.

Header lines, their number and bytes, and the time until they are there; the time that a body may
take; a connection beyond those that may be open; one request at a time. Who breaks one is answered
with a status and a JSON error, and the connection is closed: no application has seen the request,
so the answer is not in a front end's words. A late body alone is left to its application.
"""

import asyncio
import functools
from typing import Any, NamedTuple
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
    Refusal,
    Refused,
    body_of,
    not_a_target,
    not_http,
)
from loraplex.core.errors import BodyTimeoutError, NotReadyError
from loraplex.frontends.telemetry.connections import HttpConnections

_END = b"\r\n\r\n"
"""Every head ends so, and every body in chunks: the parser takes no other line ends."""
_BLANKS = b" \t"
"""No part of a header's value; the parser leaves those behind it."""
_LINE_ENDS = b"\r\n"
_MOST_EARLY = 64 * 1024
"""Bytes behind a request in work that are read: who stopped reading would not see its client go."""


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
        self._body_timer: asyncio.TimerHandle | None = None
        """Of a body that did not come with its head."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_until: float | None = None
        """By the loop's clock, where the next request must have begun; None: one has."""
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
        self.cycle: Exchange | None = None  # type: ignore[assignment]

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
        self.connections.discard(self)
        for timer in (self._header_timer, self._body_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnect()
        self.flow.resume_writing()
        if exc is None:
            self.transport.close()
        self.parser = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering():
            self._keep(self._early + data)
        else:
            self._read(data)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._idle_until = self.loop.time() + self.timeout_keep_alive
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_at(self._idle_until, self._look_if_idle)
        if self._early:
            early = self._early
            self._keep(b"")
            self._read(early)

    def shutdown(self) -> None:
        """Called when the server stops. A request that is here as a whole is still answered."""
        super().shutdown()
        if self._is_in_body and self.cycle is not None:
            self.cycle.give_up(NotReadyError("the server is stopping", retry_after_seconds=1))

    def _look_if_idle(self) -> None:
        """One timer for many requests: a timer for each would be stopped long before its time."""
        self._idle_timer = None
        if self._idle_until is None or self.transport.is_closing():
            return
        if self.loop.time() < self._idle_until:
            self._idle_timer = self.loop.call_at(self._idle_until, self._look_if_idle)
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        """A request is here as a whole, and its answer is not yet there."""
        return self.cycle is not None and not (self._is_in_body or self.cycle.response_complete)

    def _keep(self, early: bytes) -> None:
        self._early = early
        self._flow.hold(is_held=len(early) > _MOST_EARLY)

    # ---------------------------------------------------------------- reading

    def _read(self, data: bytes) -> None:
        """Feed the parser, never beyond the end of a request: one at a time is answered."""
        while data:
            if not (self._is_in_body or self._num_pending):
                data = data.lstrip(_LINE_ENDS)  # between two requests: RFC 9112, 2.2
                if not data:
                    break
            size = self._next_size(data)
            if not self._feed(data[:size]):
                return
            data = data[size:]
            if data and self._is_answering():
                self._keep(data)
                return
        if self._is_in_body:
            self._await_body()
        elif self._num_pending:
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
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # One behind the body is none: the application has the headers, and nobody checked it.
        if not self._is_in_body:
            self.headers.append((name.lower(), value.rstrip(_BLANKS)))

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        num_bytes, is_held_back = body_of(method, self.url, version, self.headers, self._limits)
        if self.parser.should_upgrade():
            return  # The head is read again.
        self._stop_waiting()
        self._is_in_body = True
        self._num_pending, self._num_body_bytes = 0, num_bytes
        self.cycle = Exchange(
            self._scope(method, version),
            self._writes,
            self.flow,
            self.server_state.default_headers,
            expect_100_continue=is_held_back,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self._start_asgi_task(self.cycle, self.app)

    def _scope(self, method: bytes, version: str) -> dict[str, Any]:
        target = _target_of(self.url)
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": method.decode("ascii"),
            "root_path": "",
            "path": target.path,
            "raw_path": target.raw_path,
            "query_string": target.query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        if self._num_body_bytes:
            self._num_body_bytes -= len(body)
        assert self.cycle is not None
        self.cycle.take(body)

    def on_message_complete(self) -> None:
        if self._is_in_body:
            self._is_in_body = False
            self._num_pending = 0
            if self._body_timer is not None:
                self._body_timer.cancel()
                self._body_timer = None
            assert self.cycle is not None
            self.cycle.take_end()

    # ---------------------------------------------------------------- waiting

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._idle_until = None
            seconds = self._limits.header_timeout_seconds
            self._header_timer = self.loop.call_later(seconds, self._headers_are_late)

    def _await_body(self) -> None:
        if self._body_timer is None:
            seconds = self._limits.body_timeout_seconds
            self._body_timer = self.loop.call_later(seconds, self._body_is_late)

    def _stop_waiting(self) -> None:
        self._idle_until = None
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

    def _body_is_late(self) -> None:
        assert self.cycle is not None
        seconds = self._limits.body_timeout_seconds
        error = BodyTimeoutError(f"the request body did not come within {seconds:g} seconds")
        self.cycle.give_up(error)

    # ---------------------------------------------------------------- refusing

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and close. The bytes are written here: no application may be there to."""
        self._counts.refused(refusal.code)
        if self.cycle is not None and not self.cycle.response_complete:
            # A broken body: its application is told as if the client had gone.
            self.cycle.disconnect()
            if self.cycle.response_started:
                self.transport.close()
                return
        self.transport.write(refusal.answer())
        self.transport.close()


class _Flow(FlowControl):
    """Nothing is read while it is held: a client could have any number of bytes kept."""

    _is_held = False

    def hold(self, *, is_held: bool) -> None:
        self._is_held = is_held
        if is_held:
            self.pause_reading()
        else:
            self.resume_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self._is_held:
            super().resume_reading()


class _Target(NamedTuple):
    path: str
    raw_path: bytes
    query: bytes


@functools.lru_cache(maxsize=256)  # clients ask for the same again and again
def _target_of(url: bytes) -> _Target:
    try:
        target = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise Refused(not_a_target()) from None
    raw_path = target.path or b"/"
    path = raw_path.decode("ascii")
    return _Target(unquote(path) if "%" in path else path, raw_path, target.query or b"")
