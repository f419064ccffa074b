import asyncio
import contextlib
import functools

import pytest

from loraplex.frontends.kserve.inference import StopSignal, alone
from loraplex.serving.interleaving import interleaved


async def count(limit, *, pause=0.0, fail_at=None):
    for number in range(1, limit + 1):
        await asyncio.sleep(pause)
        if number == fail_at:
            raise ValueError(number)
        yield number


async def read(*streams, stop=None):
    """All items, and in the end nothing is left."""
    items, stop = [], stop or StopSignal()
    merged = interleaved(streams) if len(streams) > 1 else alone(streams[0])
    async with contextlib.aclosing(merged) as merging:
        read_next = functools.partial(anext, merging, None)
        while (found := await stop.result_before_stop(read_next)) is not None:
            items.append(found)
    return items


async def test_everything_comes_in_order_of_its_stream():
    items = await read(count(3), count(2))
    assert sorted(items) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert [n for i, n in items if i == 0] == [1, 2, 3]


async def test_one_stream():
    assert await read(count(3)) == [(0, 1), (0, 2), (0, 3)]


async def test_a_slow_stream_does_not_hold_a_fast_one_up():
    items = await read(count(1, pause=0.05), count(3))
    assert items[-1] == (0, 1)


async def test_an_error_ends_everything():
    with pytest.raises(ValueError, match="2"):
        await read(count(100, pause=0.001), count(5, fail_at=2))


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_stop_ends_a_wait(num_streams):
    stop = StopSignal()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    async with asyncio.timeout(60):
        assert await read(*(count(1, pause=60) for _ in range(num_streams)), stop=stop) == []


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_nothing_is_read_after_a_stop(num_streams):
    stop = StopSignal()
    stop.set()
    assert await read(*(count(3) for _ in range(num_streams)), stop=stop) == []


async def test_at_most_one_item_of_a_stream_is_read_ahead():
    numbers = []

    async def noted(limit):
        async for number in count(limit):
            numbers.append(number)
            yield number

    async with contextlib.aclosing(interleaved([noted(5), count(1)])) as merging:
        while await anext(merging) != (0, 1):
            pass
        await asyncio.sleep(0.01)
        assert numbers == [1, 2]


async def test_nothing_is_left_running():
    before = asyncio.all_tasks()
    merging = interleaved([count(100, pause=0.001), count(100, pause=60)])
    await anext(merging)
    await merging.aclose()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("num_streams", [1, 2])
async def test_a_stop_leaves_its_reader_as_it_was(num_streams, times):
    stop = StopSignal()
    for _ in range(times):
        asyncio.get_running_loop().call_later(0.01, stop.set)
    assert await read(*(count(1, pause=60) for _ in range(num_streams)), stop=stop) == []
    reader = asyncio.current_task()
    assert reader is not None
    assert reader.cancelling() == 0


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_a_cancelled_request_is_cancelled_whether_or_not_it_is_stopped_too(num_streams):
    for is_stopped in (False, True):
        stop = StopSignal()
        streams = [count(1, pause=60) for _ in range(num_streams)]
        task = asyncio.create_task(read(*streams, stop=stop))
        await asyncio.sleep(0.01)
        if is_stopped:
            stop.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
