"""Middleware of every HTTP app: request ids, telemetry, and `Connection: close` while draining."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.errors import InternalError
from loraplex.frontends.headers import headers_of
from loraplex.frontends.telemetry.request_ids import HEADER
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import WireRequest, as_current

CLIENT_CLOSED_REQUEST = "499"
"""Status without a response, as nginx logs it."""
_FAILED = "500"
_ID = HEADER.encode()
_CACHING, _SNIFFING = b"cache-control", b"x-content-type-options"


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
        response = _Response(send, request, self._is_draining)
        status = _FAILED
        try:
            with as_current(request):
                await self._app(scope, receive, response.send)
            status = response.status or CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:
            status = response.status or CLIENT_CLOSED_REQUEST
            raise
        except Exception:
            request.error = InternalError("no front end handled it")
            raise
        finally:
            # Empty if no route matched.
            request.route = str(getattr(scope.get("route"), "path", ""))
            request.end(status)

    def _begun(self, scope: Scope) -> WireRequest:
        client = scope.get("client")
        return self._telemetry.begin(
            "http", scope["method"], scope["path"], client[0] if client else "", headers_of(scope)
        )


class _Response:
    """Response being sent: adds the headers that every response has, and keeps the status."""

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
            # Nothing is to keep a copy of data, or to take it for another type.
            if _CACHING not in names:
                headers.append((_CACHING, b"no-store"))
            if _SNIFFING not in names:
                headers.append((_SNIFFING, b"nosniff"))
            # The next request is to find another server.
            if self._is_draining() and b"connection" not in names:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        return self._send(message)
