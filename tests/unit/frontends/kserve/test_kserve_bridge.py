"""The bridge between the event loop of this test and another one, in a thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.grpc.bridge import ITEMS_AHEAD, LoopBridge
from loraplex.frontends.kserve.grpc.server import GrpcServer
from loraplex.frontends.kserve.service import TritonService
from loraplex.testing.echo_backend import EchoBackend


@pytest.fixture
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Numbers:
    """1, 2, 3, ... on one loop; records where it ran and whether it was closed."""

    def __init__(self, limit: int, *, fail: bool = False, pause: float = 0.0) -> None:
        self.last = 0
        self.limit = limit
        self.fail = fail
        self.pause = pause
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def __aiter__(self):
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(self.pause)
        self.threads.add(threading.current_thread().name)
        if self.last == self.limit:
            if self.fail:
                raise ValueError("broken")
            raise StopAsyncIteration
        self.last += 1
        return self.last

    async def aclose(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed.set()


def opener(numbers):
    async def open_stream():
        return numbers

    return open_stream


async def test_call(other_loop):
    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert await LoopBridge(other_loop).call(where()) is other_loop


async def test_cancelling_a_call_cancels_it_there(other_loop):
    cancelled = threading.Event()
    running = threading.Event()

    async def wait() -> None:
        try:
            running.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(LoopBridge(other_loop).call(wait()))
    assert await asyncio.to_thread(running.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(cancelled.wait, 5)


async def test_items_in_order_and_closed_there(other_loop):
    numbers = Numbers(100)
    got = [item async for item in LoopBridge(other_loop).iterate(opener(numbers))]
    assert got == list(range(1, 101))
    assert numbers.closed.is_set()
    assert threading.current_thread().name not in numbers.threads


async def test_an_error_comes_after_the_items(other_loop):
    numbers = Numbers(3, fail=True)
    items = LoopBridge(other_loop).iterate(opener(numbers))
    assert [await anext(items) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="broken"):
        await anext(items)
    assert numbers.closed.is_set()


async def test_an_error_of_the_opening(other_loop):
    async def open_stream():
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        async for _ in LoopBridge(other_loop).iterate(open_stream):
            pass


async def test_a_slow_reader_holds_its_own_stream_only(other_loop):
    slow, fast = Numbers(10_000), Numbers(50)
    bridge = LoopBridge(other_loop)
    async with aclosing(bridge.iterate(opener(slow))) as items:
        assert await anext(items) == 1
        assert [item async for item in bridge.iterate(opener(fast))] == list(range(1, 51))
        await asyncio.sleep(0.05)
        assert slow.last <= ITEMS_AHEAD + 2
    assert await asyncio.to_thread(slow.closed.wait, 5)


async def test_closing_closes_there(other_loop):
    numbers = Numbers(10, pause=0.01)
    async with aclosing(LoopBridge(other_loop).iterate(opener(numbers))) as items:
        await anext(items)
    assert await asyncio.to_thread(numbers.closed.wait, 5)


async def test_a_taken_port_is_an_error_of_the_operator():
    service = TritonService(EchoBackend())
    loop = asyncio.get_running_loop()
    first = GrpcServer(service, loop, "127.0.0.1", 0)
    await first.start()
    second = GrpcServer(service, loop, "127.0.0.1", first.port)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{first.port}"):
        await second.start()
    await first.stop(0)
    await first.stop(0)
    assert not [t for t in threading.enumerate() if t.name == "kserve-grpc"]
