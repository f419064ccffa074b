"""One HTTP connection with limits: what uvicorn's own protocol takes without any.

Header lines, their number and bytes, and the time until they are there; a connection beyond those
that may be open. Who breaks one is answered with a status and a JSON error, and the connection is
closed: no application has seen the request, so the answer is not in a front end's words.
"""

import asyncio
import http
from typing import Any, NamedTuple

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from loraplex.frontends.telemetry.connections import HttpConnections


class ConnectionLimits(NamedTuple):
    max_connections: int
    max_headers: int
    max_header_bytes: int
    max_request_line_bytes: int
    header_timeout_seconds: float


class Refusal(NamedTuple):
    status: int
    code: str
    message: str


class LimitedConnection(H11Protocol):
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
        self._parser = LimitedParser(limits)
        self.conn = self._parser
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._counts.num_open += 1
        if len(self.connections) > self._limits.max_connections:
            most = self._limits.max_connections
            self._refuse(Refusal(503, "too_many_connections", f"{most} connections are open"))
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.num_open -= 1
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            # The rest of a body whose request is answered: it does not keep the connection alive.
            self.conn.receive_data(data)
            self.handle_events()
        else:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()
        elif self._header_timer is None and self.conn.trailing_data[0]:
            self._await_headers()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what its parser refused."""
        del msg
        self._refuse(self._parser.refusal())

    def _await_headers(self) -> None:
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
        if not self.conn.trailing_data[0]:
            self._counts.refused("idle")
            self.transport.close()
            return
        seconds = self._limits.header_timeout_seconds
        self._refuse(
            Refusal(408, "header_timeout", f"the headers did not come within {seconds:g} seconds")
        )

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and close. The bytes are written here: the parser may be in no state to."""
        self._counts.refused(refusal.code)
        if self.cycle is not None and not self.cycle.response_complete:
            # A broken body: its application is told as if the client had gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        error = {
            "message": refusal.message,
            "type": "invalid_request_error"
            if refusal.status < 500
            else "service_unavailable_error",
            "param": None,
            "code": refusal.code,
        }
        body = msgspec.json.encode({"error": error})
        retry = "retry-after: 1\r\n" if refusal.status == 503 else ""
        head = (
            f"HTTP/1.1 {refusal.status} {http.HTTPStatus(refusal.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class LimitedParser(h11.Connection):
    """h11's parser, which keeps why it refused what came."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._error: h11.RemoteProtocolError | None = None
        self._refusal: Refusal | None = None

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError, also for what is over our limits."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self._error = error
            raise
        if isinstance(event, h11.Request):
            self._refusal = self._over_limits(event)
            if self._refusal is not None:
                raise h11.RemoteProtocolError(self._refusal.message)
        return event

    def refusal(self) -> Refusal:
        """Of what next_event raised last."""
        if self._refusal is not None:
            return self._refusal
        if self._error is None or self._error.error_status_hint == 400:
            return Refusal(400, "invalid_request", f"this is not HTTP: {self._error}")
        if self._error.error_status_hint == 431:
            return self._too_long()
        status = self._error.error_status_hint
        return Refusal(status, "invalid_request", str(self._error))

    def _too_long(self) -> Refusal:
        """Of headers that have no end yet."""
        has_line = b"\n" in self.trailing_data[0]
        return self._headers_too_large() if has_line else self._line_too_long()

    def _headers_too_large(self) -> Refusal:
        most = self._limits.max_header_bytes
        return Refusal(431, "headers_too_large", f"request line and headers are over {most} bytes")

    def _line_too_long(self) -> Refusal:
        most = self._limits.max_request_line_bytes
        return Refusal(414, "request_line_too_long", f"the request line is over {most} bytes")

    def _over_limits(self, request: h11.Request) -> Refusal | None:
        line = len(request.method) + len(request.target) + len(" HTTP/1.1") + 1
        if line > self._limits.max_request_line_bytes:
            return self._line_too_long()
        headers = list(request.headers)
        if len(headers) > self._limits.max_headers:
            most = self._limits.max_headers
            return Refusal(431, "too_many_headers", f"there are over {most} headers")
        num_bytes = line + sum(len(name) + len(value) + 4 for name, value in headers)
        if num_bytes > self._limits.max_header_bytes:
            return self._headers_too_large()
        return None
