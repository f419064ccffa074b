"""Merges the outputs of several requests in the order in which they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def interleaved(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, its item). The first error of a stream ends all."""
    waiting = {_next_of(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                item = task.result()
                index = waiting.pop(task)
                if item is not None:
                    waiting[_next_of(streams[index])] = index
                    yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next_of(stream: AsyncIterator[T]) -> "asyncio.Task[T | None]":
    async def next_item() -> T | None:
        return await anext(stream, None)

    return asyncio.create_task(next_item())
