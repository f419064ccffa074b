"""Several async iterators read as one, until all end or someone says stop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


async def merged(
    streams: Sequence[AsyncIterator[T]], stopped: asyncio.Event
) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the stream, item), as they come. Ends early, and quietly, once `stopped` is set.

    A stream's error ends everything. Nothing is read ahead of the consumer but one item a stream.
    The streams are not closed: whoever opened them does that.
    """
    if len(streams) == 1:
        async with aclosing(_one(streams[0], stopped)) as items:
            async for only in items:
                yield 0, only
        return
    stop = asyncio.ensure_future(stopped.wait())
    steps = {asyncio.ensure_future(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while steps and not stopped.is_set():
            done, _ = await asyncio.wait({stop, *steps}, return_when=asyncio.FIRST_COMPLETED)
            for step in [step for step in steps if step in done]:
                index = steps.pop(step)
                item = step.result()
                if item is None:
                    continue
                yield index, item
                steps[asyncio.ensure_future(_next(streams[index]))] = index
    finally:
        for task in (stop, *steps):
            task.cancel()
        await asyncio.gather(stop, *steps, return_exceptions=True)


async def _one(stream: AsyncIterator[T], stopped: asyncio.Event) -> AsyncGenerator[T, None]:
    """The same for a single stream, without a task for each item."""
    reader: asyncio.Task[Any] | None = None
    is_interrupted = False

    def interrupt(_: object) -> None:
        nonlocal is_interrupted
        if reader is not None:
            is_interrupted = True
            reader.cancel()

    stop = asyncio.ensure_future(stopped.wait())
    stop.add_done_callback(interrupt)
    try:
        while not stopped.is_set():
            reader = asyncio.current_task()
            try:
                item = await _next(stream)
            except asyncio.CancelledError:
                # Others may have cancelled the reader, too: that is not ours to end.
                if not is_interrupted or reader is None or reader.uncancel() > 0:
                    raise
                return
            finally:
                reader = None
            if item is None:
                return
            yield item
    finally:
        stop.remove_done_callback(interrupt)
        stop.cancel()


async def _next(stream: AsyncIterator[T]) -> T | None:
    """The next item; None at the end (no stream of ours has None as an item)."""
    return await anext(stream, None)
