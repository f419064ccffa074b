import asyncio

import pytest

from loraplex.frontends.kserve.merge import merged


async def count(limit, *, pause=0.0, fail_at=None):
    for number in range(1, limit + 1):
        await asyncio.sleep(pause)
        if number == fail_at:
            raise ValueError(number)
        yield number


async def test_everything_comes_in_order_of_its_stream():
    items = [item async for item in merged([count(3), count(2)], asyncio.Event())]
    assert sorted(items) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert [n for i, n in items if i == 0] == [1, 2, 3]


async def test_a_slow_stream_does_not_hold_a_fast_one_up():
    items = [item async for item in merged([count(1, pause=0.05), count(3)], asyncio.Event())]
    assert items[-1] == (0, 1)


async def test_an_error_ends_everything():
    with pytest.raises(ValueError, match="2"):
        async for _ in merged([count(100, pause=0.001), count(5, fail_at=2)], asyncio.Event()):
            pass


async def test_stop_ends_a_wait():
    stopped = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stopped.set)
    async with asyncio.timeout(5):
        assert [item async for item in merged([count(1, pause=60)], stopped)] == []


async def test_nothing_is_left_running():
    before = asyncio.all_tasks()
    items = merged([count(100, pause=0.001), count(100, pause=60)], asyncio.Event())
    await anext(items)
    await items.aclose()
    assert asyncio.all_tasks() == before


async def test_a_stop_leaves_its_reader_as_it_was():
    stopped = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stopped.set)
    assert [item async for item in merged([count(1, pause=60)], stopped)] == []
    reader = asyncio.current_task()
    assert reader is not None
    assert reader.cancelling() == 0


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_who_is_cancelled_is_cancelled_whether_or_not_it_is_stopped_too(num_streams):
    async def read(stopped):
        streams = [count(1, pause=60) for _ in range(num_streams)]
        return [item async for item in merged(streams, stopped)]

    for is_stopped in (False, True):
        stopped = asyncio.Event()
        task = asyncio.create_task(read(stopped))
        await asyncio.sleep(0.01)
        if is_stopped:
            stopped.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
