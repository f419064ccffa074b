"""Limits of request bodies: of their memory, which all connections share, and of what is parsed.

A few bytes may become a large object, and take long to parse.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Self, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request

from loraplex.core.errors import PayloadTooLargeError
from loraplex.core.server_config import ServerConfig
from loraplex.serving.access.tenant_bytes import SMALL_BYTES, TenantBytes
from loraplex.serving.wire_request import current_tenant

_INLINE_BYTES: Final = 32 << 10
"""Shorter bodies are parsed and written on the event loop: a thread would take longer."""
_VALUES_PER_CONTAINER: Final = 4
"""Lists and objects take more time and memory than numbers, so fewer are allowed."""
UPLOADS_PREFIX: Final = b"/v1/uploads/"
"""Beginning of paths whose bodies are not held in memory: they have limits of their own."""
_MAX_PAUSE: Final = 0.1
T = TypeVar("T")


async def off_loop(num_bytes: int, write: Callable[[], T]) -> T:
    """Return write(), which is called in a thread if it has many bytes of a response to write."""
    return write() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(write)


async def parsed(num_bytes: int, parse: Callable[[], T]) -> T:
    """Return parse(), which reads so many bytes of a request; long ones in turns, in a thread."""
    if num_bytes <= _INLINE_BYTES:
        return parse()
    return await asyncio.to_thread(_TURNS.take, parse)


class Turns:
    """Turns of long texts: a pause follows each that is as long as it took, up to 0.1 seconds.

    A parser keeps the interpreter's lock for the whole of a text, so several in threads are no
    faster, and the event loop would wait for one of them whenever it has waited for a client.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._next = 0.0
        """When the next turn may begin."""

    def take(self, parse: Callable[[], T]) -> T:
        """Return parse(), after the turns before it and their pauses."""
        with self._lock:
            start = self._now()
            if start < self._next:
                self._sleep(self._next - start)
                start = self._now()
            try:
                return parse()
            finally:
                end = self._now()
                self._next = end + min(end - start, _MAX_PAUSE)


_TURNS: Final = Turns()


class JsonLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one JSON text; see the server's settings of the same meaning."""

    max_bytes: int
    max_values: int

    @classmethod
    def of(cls, settings: ServerConfig) -> "JsonLimits":
        return cls(
            max_bytes=min(settings.max_json_bytes, settings.max_body_bytes),
            max_values=settings.max_request_values,
        )

    def check(self, text: bytes | bytearray) -> None:
        """Raise PayloadTooLargeError for a text that is too long or has too many values."""
        if len(text) > self.max_bytes:
            raise PayloadTooLargeError(
                f"the JSON of the request has {len(text)} bytes; at most {self.max_bytes} are "
                "allowed (max_json_bytes)"
            )
        # Each value has a mark next to it, and a member of an object, which costs more, has two.
        for what, marks, limit in (
            ("lists and objects", b"[{", self.max_values // _VALUES_PER_CONTAINER),
            ("values", b",:[{", self.max_values),
        ):
            if len(text) < limit or _num_bytes_of(marks, text) < limit:
                continue
            count = _num_outside_strings(marks, text)
            if count >= limit:
                raise PayloadTooLargeError(
                    f"the JSON of the request has {count} {what}; at most {limit} are allowed "
                    f"(max_request_values {self.max_values})"
                )


def _num_bytes_of(marks: bytes, text: bytes | bytearray) -> int:
    """Count the bytes of `marks`. numpy lets other threads run meanwhile."""
    array = np.frombuffer(text, np.uint8)
    return sum(int(np.count_nonzero(array == mark)) for mark in marks)


def _num_outside_strings(marks: bytes, text: bytes | bytearray) -> int:
    """Count the bytes of `marks` that belong to no string."""
    for escape in (rb"\\", rb"\""):
        text = text.replace(escape, b"")
    array = np.frombuffer(text, np.uint8)
    quotes = np.cumsum(array == ord('"'), dtype=np.uint8)  # only its parity counts
    found = np.zeros(len(array), np.bool_)
    for mark in marks:
        found |= array == mark
    return int(np.count_nonzero(found & (quotes & 1 == 0)))


DEFAULT_JSON_LIMITS: Final = JsonLimits.of(ServerConfig())

LEASE: Final = "loraplex.body_lease"
"""Key of a request's lease in its scope."""


class BodyMemory(TenantBytes):
    """Bytes of the bodies that are being read, parsed and converted, in total and by tenant."""

    def lease(self) -> "BodyLease":
        return BodyLease(self)


@dataclasses.dataclass(slots=True, eq=False)
class BodyLease:
    """Bytes of one body, until it is released. They count for the tenant that sends them."""

    _memory: BodyMemory
    _tenant: str | None = None
    _num_free: int = SMALL_BYTES
    _num_bytes: int = 0

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
