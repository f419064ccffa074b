"""In-flight inference requests: their outputs read as one, and another request can stop them.

A stop request has the client's id of that request; without an id it means the requests
of its own stream.
"""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from loraplex.core.errors import InvalidRequestError

T = TypeVar("T")


class StopSignal:
    """Said by anyone on the loop, once; it ends the wait of the one reader, if that waits."""

    is_set = False
    _reader: asyncio.Task[object] | None = None
    _has_interrupted = False

    def set(self) -> None:
        """Idempotent."""
        if not self.is_set:
            self.is_set = True
            if self._reader is not None:
                self._has_interrupted = True
                self._reader.cancel()

    async def result_before_stop(self, read: Callable[[], Awaitable[T]]) -> T | None:
        """What it reads, or None as soon as stop is said."""
        if self.is_set:
            return None
        self._reader = reader = asyncio.current_task()
        try:
            return await read()
        except asyncio.CancelledError:
            # Others may have cancelled the reader, too: that is not ours to end.
            if not self._has_interrupted or reader is None or reader.uncancel() > 0:
                raise
            return None
        finally:
            self._reader = None


class Merged(ABC, Generic[T]):
    """Items of all streams as they come; at most one of each stream is read ahead.

    The streams are not closed: the code that opened them does that.
    """

    index = 0
    """Index of the stream that the last item is from."""

    @abstractmethod
    def next(self) -> Awaitable[T | None]:
        """The next item; None at the end, and once stop is said.

        Raises the error of a stream, which ends everything. No stream of ours has None as an item.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Cancel everything that is in flight."""


def merged(streams: Sequence[AsyncIterator[T]], stop: StopSignal) -> Merged[T]:
    """Merge streams; a single one needs no task for each item."""
    return _One(streams[0], stop) if len(streams) == 1 else _Several(streams, stop)


class _One(Merged[T]):
    def __init__(self, stream: AsyncIterator[T], stop: StopSignal) -> None:
        self._read = functools.partial(anext, stream, None)
        self._stop = stop

    def next(self) -> Awaitable[T | None]:
        return self._stop.result_before_stop(self._read)

    async def aclose(self) -> None:
        """Do nothing: only a call of `next` can be in flight."""


class _Several(Merged[T]):
    def __init__(self, streams: Sequence[AsyncIterator[T]], stop: StopSignal) -> None:
        self._streams = streams
        self._stop = stop
        self._steps: dict[asyncio.Future[T | None], int] = {}
        """Reads in flight, and the indices of their streams."""
        self._done: deque[asyncio.Future[T | None]] = deque()
        for index in range(len(streams)):
            self._begin_step(index)

    async def next(self) -> T | None:
        while self._steps and not self._stop.is_set:
            if not self._done:
                await self._stop.result_before_stop(self._wait)
                self._done.extend(step for step in self._steps if step.done())
                continue
            step = self._done.popleft()
            self.index = self._steps.pop(step)
            item = step.result()
            if item is not None:
                self._begin_step(self.index)
                return item
        return None

    async def aclose(self) -> None:
        for step in self._steps:
            step.cancel()
        await asyncio.gather(*self._steps, return_exceptions=True)

    async def _wait(self) -> None:
        await asyncio.wait(self._steps, return_when=asyncio.FIRST_COMPLETED)

    def _begin_step(self, index: int) -> None:
        self._steps[asyncio.ensure_future(_next(self._streams[index]))] = index


async def _next(stream: AsyncIterator[T]) -> T | None:
    return await anext(stream, None)


class StreamScope:
    """One bidirectional stream of a client. Only its identity matters."""


class ActiveRequest(StopSignal):
    """Once it is stopped, it ends with what it has."""

    def __init__(
        self, others: "ActiveRequests", key: tuple[str, str], scope: StreamScope | None
    ) -> None:
        """key: its tenant, and the client's request id."""
        self.key = key
        self.scope = scope
        self._others = others
        others.by_key.setdefault(key, set()).add(self)

    def end(self) -> None:
        """Nothing is left to stop. Idempotent."""
        self._others.remove(self)


class ActiveRequests:
    """Ids may repeat: a stop request then stops every request of its id."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, str], set[ActiveRequest]] = {}

    def remove(self, request: ActiveRequest) -> None:
        """Idempotent."""
        requests = self.by_key.get(request.key)
        if requests is not None:
            requests.discard(request)
            if not requests:
                del self.by_key[request.key]

    def __len__(self) -> int:
        return sum(map(len, self.by_key.values()))

    def stop(self, tenant: str, client_request_id: str, scope: StreamScope | None) -> None:
        """Stop the requests that a stop request means. None of them is fine: it has ended.

        Raises InvalidRequestError for a stop request without an id that came alone.
        """
        if client_request_id:
            victims = self.by_key.get((tenant, client_request_id), set())
        elif scope is not None:
            victims = {
                request
                for requests in self.by_key.values()
                for request in requests
                if request.scope is scope
            }
        else:
            raise InvalidRequestError(
                "Trying to stop a request but request ID is not provided; send the id of the "
                "request to stop, or send the stop request over the same stream",
                param="id",
            )
        for request in victims:
            request.set()
