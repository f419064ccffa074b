"""Common memory limit of the bodies of all connections."""

from collections.abc import AsyncIterator
from typing import Final, Self

from starlette.requests import Request

from loraplex.serving.access.tenant_bytes import SMALL_BYTES, TenantBytes
from loraplex.serving.wire_request import current_tenant

LEASE: Final = "loraplex.body_lease"
"""Key of a request's lease in its scope."""


class BodyMemory(TenantBytes):
    """Bytes of the bodies that are being read, parsed and converted, in total and by tenant."""

    def lease(self) -> "BodyLease":
        return BodyLease(self)


class BodyLease:
    """Bytes of one body, until it is released. They count for the tenant that sends them."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._tenant: str | None = None
        self._num_free = SMALL_BYTES
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises NotReadyError if there are too many."""
        counted = max(0, num_bytes - self._num_free)
        self._num_free -= num_bytes - counted
        if counted:
            if self._tenant is None:
                self._tenant = current_tenant()
            self._memory.take(self._tenant, counted)
            self._num_bytes += counted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._tenant is not None and self._num_bytes:
            self._memory.release(self._tenant, self._num_bytes)
            self._num_bytes = 0


async def passing_body(request: Request) -> AsyncIterator[bytes]:
    """Yield the body of a request that is not kept: a piece counts until the next is read."""
    lease: BodyLease | None = request.scope.get(LEASE)
    async for piece in request.stream():
        yield piece
        if lease is not None:
            lease.release()
