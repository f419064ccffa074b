"""Between two event loops: this one (gRPC's) and the backend's.

A coroutine or an async iterator of the backend's loop is used from here. Cancelling here cancels
there. An iterator runs at most a few items ahead of its reader, and waits without holding up
anything else on its loop.
"""

import asyncio
import enum
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ITEMS_AHEAD = 16


class ClosableIterator(Protocol[T_co]):
    """An async iterator that must be closed by its reader."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class _End(enum.Enum):
    END = enum.auto()


class LoopBridge:
    """Runs things on `loop`, for callers on another loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs on the backend's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def iterate(
        self, open_stream: Callable[[], Awaitable[ClosableIterator[T]]]
    ) -> AsyncGenerator[T, None]:
        """The items of the iterator that `open_stream` gives; it is opened, read and closed there.

        Closing this generator, or cancelling its reader, closes the iterator.
        """
        here = asyncio.get_running_loop()
        items: asyncio.Queue[T | _End] = asyncio.Queue()
        room = asyncio.Semaphore(ITEMS_AHEAD)  # used on the backend's loop only

        async def pump() -> None:
            stream = await open_stream()
            try:
                async for item in stream:
                    await room.acquire()
                    here.call_soon_threadsafe(items.put_nowait, item)
            finally:
                await stream.aclose()

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        pumping.add_done_callback(lambda _: here.call_soon_threadsafe(items.put_nowait, _End.END))
        try:
            while (item := await items.get()) is not _End.END:
                yield item
                self._loop.call_soon_threadsafe(room.release)
            pumping.result()
        finally:
            pumping.cancel()
