"""Around every HTTP app: request ids, the access log's and the traces' begin and end, and the word
to clients of a server that drains.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.errors import InternalError
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
        self, app: ASGIApp, telemetry: Telemetry, *, is_draining: Callable[[], bool]
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = self._begun(scope)
        scope.setdefault("state", {})["request_id"] = request.request_id
        answer = _Answer(send, request, self._is_draining)
        status = _FAILED
        try:
            with as_current(request):
                await self._app(scope, receive, answer.send)
            status = answer.status or CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:
            status = answer.status or CLIENT_CLOSED_REQUEST
            raise
        except Exception:
            request.error = InternalError("no room of the server caught it")
            raise
        finally:
            # Empty if the framework did not tell.
            request.route = str(getattr(scope.get("route"), "path", ""))
            request.end(status)

    def _begun(self, scope: Scope) -> WireRequest:
        client = scope.get("client")
        return self._telemetry.begin(
            "http", scope["method"], scope["path"], client[0] if client else "", headers_of(scope)
        )


class _Answer:
    """What is sent, with the headers that every answer has; its status is kept."""

    __slots__ = ("_is_draining", "_request", "_send", "status")

    def __init__(self, send: Send, request: WireRequest, is_draining: Callable[[], bool]) -> None:
        self._send = send
        self._request = request
        self._is_draining = is_draining
        self.status = ""

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = str(message["status"])
            headers = [*message.get("headers", ())]
            names = [name for name, _ in headers]  # in lower case, as ASGI has them
            if _ID not in names:
                headers.append((_ID, self._request.request_id.encode()))
            # The next request is to find another server.
            if self._is_draining() and b"connection" not in names:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        return self._send(message)
