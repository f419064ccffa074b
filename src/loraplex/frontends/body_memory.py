"""Common memory limit of the request bodies of all connections."""

import collections
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Final, Self

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import NotReadyError
from loraplex.core.server_config import ServerConfig
from loraplex.serving.wire_request import current_tenant

_SMALL_BYTES: Final = 64 << 10
"""Part of each body that does not count: large bodies must not keep out small requests. Their
number is that of the connections, which has its own limit."""
_DEFAULT_NUM_BODIES: Final = 8
_RETRY_SECONDS: Final = 1.0
_LEASE: Final = "loraplex.body_lease"
"""Key of a request's lease in its scope."""


class BodyMemory:
    """Bytes of the bodies that are being read, parsed and converted, in total and by tenant."""

    def __init__(self, max_bytes: int = sys.maxsize, max_tenant_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._by_tenant: collections.Counter[str] = collections.Counter()

    @classmethod
    def of(cls, settings: ServerConfig, *, has_keys: bool) -> Self:
        """Return the memory that the settings allow; with keys a tenant has half of it."""
        one = settings.max_body_bytes
        most = max(settings.max_bodies_bytes or _DEFAULT_NUM_BODIES * one, 2 * one)
        return cls(most, most // 2 if has_keys else most)

    @property
    def num_bytes(self) -> int:
        return self._by_tenant.total()

    def lease(self) -> "BodyLease":
        return BodyLease(self, current_tenant())

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes. Raises NotReadyError if there are too many, and counts nothing."""
        if (
            self.num_bytes + num_bytes > self._max_bytes
            or self._by_tenant[tenant] + num_bytes > self._max_tenant_bytes
        ):
            raise NotReadyError(
                f"request bodies take all of their memory ({readable_bytes(self._max_bytes)} in "
                f"total, {readable_bytes(self._max_tenant_bytes)} for a tenant: max_bodies_bytes): "
                "please try again",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._by_tenant[tenant] += num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        self._by_tenant[tenant] -= num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class BodyLease:
    """Bytes of one body, until it is released."""

    def __init__(self, memory: BodyMemory, tenant: str) -> None:
        self._memory = memory
        self._tenant = tenant
        self._num_free = _SMALL_BYTES
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
    """ASGI app around another, whose bodies it counts until their responses begin."""

    def __init__(self, app: ASGIApp, memory: BodyMemory) -> None:
        self._app = app
        self._memory = memory

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["method"] == "GET":
            return self._app(scope, receive, send)
        return self._counted(scope, receive, send)

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


async def passing_body(request: Request) -> AsyncIterator[bytes]:
    """Yield the body of a request that is not kept: a piece counts until the next is read."""
    lease: BodyLease | None = request.scope.get(_LEASE)
    async for piece in request.stream():
        yield piece
        if lease is not None:
            lease.release()
