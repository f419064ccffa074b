"""Around every HTTP app: request ids, the access log's and the traces' begin and end, the time that
a body may take, and the word to clients of a server that drains.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.errors import BodyTimeoutError, InternalError
from loraplex.frontends.headers import headers_of
from loraplex.frontends.telemetry.request_ids import HEADER
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import WireRequest, as_current

CLIENT_CLOSED_REQUEST = "499"
"""Nobody got an answer. The status is nginx's."""
_FAILED = "500"
_ID = HEADER.encode()


class RequestMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        telemetry: Telemetry,
        *,
        body_timeout_seconds: float,
        is_draining: Callable[[], bool],
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._body_timeout_seconds = body_timeout_seconds
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = self._begun(scope)
        scope.setdefault("state", {})["request_id"] = request.request_id
        body = TimedBody(receive, self._body_timeout_seconds)
        answer = _Answer(send, request, body, self._is_draining)
        status = _FAILED
        try:
            with as_current(request):
                await self._app(scope, body.receive, answer.send)
            status = answer.status or CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:
            status = answer.status or CLIENT_CLOSED_REQUEST
            raise
        except Exception:
            request.error = InternalError("no room of the server caught it")
            raise
        finally:
            request.route = _route(scope)
            request.end(status)

    def _begun(self, scope: Scope) -> WireRequest:
        client = scope.get("client")
        return self._telemetry.begin(
            "http", scope["method"], scope["path"], client[0] if client else "", headers_of(scope)
        )


class TimedBody:
    """A body that must have come when its time is up. Afterwards `receive` waits for ever."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self.is_whole = False
        self.is_late = False

    async def receive(self) -> Message:
        """Raises BodyTimeoutError."""
        if self.is_whole:
            return await self._receive()
        reader = asyncio.current_task()
        assert reader is not None
        # As asyncio.timeout_at, at a third of its price.
        timer = asyncio.get_running_loop().call_at(self._deadline, self._expire, reader)
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            # Others may have cancelled the reader, too: that is not ours to end.
            if self.is_late and reader.uncancel() == 0:
                raise BodyTimeoutError(
                    f"the request body did not come within {self._seconds:g} seconds"
                ) from None
            raise
        finally:
            timer.cancel()
        self.is_whole = not message.get("more_body", False)
        return message

    def _expire(self, reader: "asyncio.Task[Any]") -> None:
        self.is_late = True
        reader.cancel()


class _Answer:
    """What is sent, with the headers that every answer has; its status is kept."""

    def __init__(
        self, send: Send, request: WireRequest, body: TimedBody, is_draining: Callable[[], bool]
    ) -> None:
        self._send = send
        self._request = request
        self._body = body
        self._is_draining = is_draining
        self.status = ""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = str(message["status"])
            message = {**message, "headers": self._headers(message.get("headers", ()))}
        await self._send(message)

    def _headers(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        headers = list(given)
        names = {name.lower() for name, _ in headers}
        if _ID not in names:
            headers.append((_ID, self._request.request_id.encode()))
        # A late body makes the rest of the connection unreadable; a drain wants the next request
        # to find another server.
        if b"connection" not in names and (self._body.is_late or self._is_draining()):
            headers.append((b"connection", b"close"))
        return headers


def _route(scope: Scope) -> str:
    """The pattern that the path was found by; empty if the framework did not tell."""
    return str(getattr(scope.get("route"), "path", ""))
