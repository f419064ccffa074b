"""Common memory limits of the bodies of all connections, of requests and of responses."""

from collections.abc import AsyncIterator, Awaitable
from typing import Final, Self

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.errors import NotReadyError
from loraplex.frontends.guard import Refuse
from loraplex.serving.access.tenant_bytes import SMALL_BYTES, TenantBytes
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.wire_request import current_request, current_tenant, note_error

_LEASE: Final = "loraplex.body_lease"
"""Key of a request's lease in its scope."""


class BodyMemory(TenantBytes):
    """Bytes of the bodies that are being read, parsed and converted, in total and by tenant."""

    def lease(self) -> "BodyLease":
        return BodyLease(self, current_tenant())


class BodyLease:
    """Bytes of one body, until it is released."""

    def __init__(self, memory: BodyMemory, tenant: str) -> None:
        self._memory = memory
        self._tenant = tenant
        self._num_free = SMALL_BYTES
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises NotReadyError if there are too many."""
        counted = max(0, num_bytes - self._num_free)
        self._num_free -= num_bytes - counted
        if counted:
            self._memory.take(self._tenant, counted)
            self._num_bytes += counted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._num_bytes:
            self._memory.release(self._tenant, self._num_bytes)
            self._num_bytes = 0


class BodyMemoryGuard:
    """ASGI app around another: counts bodies until their responses begin, and long responses until
    they are sent."""

    def __init__(
        self, app: ASGIApp, memory: BodyMemory, responses: ResponseMemory, refuse: Refuse
    ) -> None:
        """refuse: makes the response in place of one that takes too much memory."""
        self._app = app
        self._memory = memory
        self._responses = responses
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = _CountedResponse(self._responses, self._refuse, scope, receive, send)
        try:
            if scope["method"] == "GET":
                await self._app(scope, receive, response.send)
            else:
                await self._counted(scope, receive, response.send)
        finally:
            response.release()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._memory.lease() as lease:
            scope[_LEASE] = lease

            async def counted_receive() -> Message:
                message = await receive()
                lease.take(len(message.get("body", b"")))
                return message

            def released_send(message: Message) -> Awaitable[None]:
                if message["type"] == "http.response.start":
                    lease.release()
                return send(message)

            await self._app(scope, counted_receive, released_send)


class _CountedResponse:
    """A response whose length counts, unless its request has reserved memory for it."""

    __slots__ = ("_is_refused", "_memory", "_num_bytes", "_refuse", "_request", "_send", "_tenant")

    def __init__(
        self, memory: ResponseMemory, refuse: Refuse, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._memory = memory
        self._refuse = refuse
        self._request = (scope, receive)
        self._send = send
        self._num_bytes = 0
        self._tenant = ""
        self._is_refused = False

    def send(self, message: Message) -> Awaitable[None]:
        if self._is_refused:
            return _nothing()
        if message["type"] != "http.response.start":
            return self._send(message)
        num_bytes = _content_length(message)
        request = current_request()
        if num_bytes > SMALL_BYTES and request is not None and not request.num_response_bytes:
            try:
                self._memory.take(request.tenant, num_bytes)
            except NotReadyError as error:
                note_error(error)
                self._is_refused = True
                response = self._refuse(self._request[0]["path"], error)
                return response(*self._request, self._send)
            self._tenant, self._num_bytes = request.tenant, num_bytes
        return self._send(message)

    def release(self) -> None:
        if self._num_bytes:
            self._memory.release(self._tenant, self._num_bytes)


async def _nothing() -> None:
    """Send nothing more of a response in whose place an error was sent."""


def _content_length(message: Message) -> int:
    """Return the length of a response; 0 if it is not known in advance."""
    found = [value for name, value in message.get("headers", ()) if name == b"content-length"]
    return int(found[0]) if found else 0


async def passing_body(request: Request) -> AsyncIterator[bytes]:
    """Yield the body of a request that is not kept: a piece counts until the next is read."""
    lease: BodyLease | None = request.scope.get(_LEASE)
    async for piece in request.stream():
        yield piece
        if lease is not None:
            lease.release()
