"""Tenants take turns in threads, however many tasks one of them has."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from loraplex.core.errors import QueueFullError
from loraplex.serving import fair_threads
from loraplex.serving.fair_threads import FairThreads
from loraplex.serving.wire_request import WireRequest, as_current


def of_tenant(tenant: str) -> as_current:
    names = dict.fromkeys(("protocol", "method", "path", "client", "request_id"), "")
    request = WireRequest(**names, headers={}, trace_of=None, on_end=None, tenant=tenant)
    return as_current(request)


class Tasks:
    """Tasks of tenants, and the order in which they ran."""

    def __init__(self, num_threads: int = 1) -> None:
        self.threads = FairThreads(num_threads, "things")
        self.ran: list[str] = []
        self.open = threading.Event()

    def start(self, tenant: str, num_bytes: int = 1) -> asyncio.Task[None]:
        with of_tenant(tenant):
            return asyncio.create_task(self.threads.run(num_bytes, lambda: self._run(tenant)))

    def _run(self, tenant: str) -> None:
        assert self.open.wait(60)
        self.ran.append(tenant)


@asynccontextmanager
async def tasks():
    made = Tasks()
    try:
        yield made
    finally:
        made.open.set()
        made.threads.close()


async def test_another_tenant_waits_for_one_task():
    async with tasks() as made:
        many = [made.start("a") for _ in range(1000)]
        await asyncio.sleep(0)
        few = [made.start("b"), made.start("c"), made.start("b")]
        await asyncio.sleep(0)
        made.open.set()
        await asyncio.gather(*many, *few)
        assert made.ran[:6] == ["a", "a", "b", "c", "a", "b"]
        assert len(made.ran) == 1003


async def test_a_cancelled_task_keeps_its_thread_until_it_ends():
    async with tasks() as made:
        running, waiting, next_one = made.start("a"), made.start("a"), made.start("b")
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert not next_one.done()
        assert made.ran == []
        made.open.set()
        await next_one
        assert made.ran == ["a", "b"]


async def test_a_turn_that_is_cancelled_when_it_comes_is_passed_on():
    async with tasks() as made:
        made.open.set()
        first, second, third = (made.start("a") for _ in range(3))
        await first
        second.cancel()
        await asyncio.wait_for(third, 60)


async def test_what_waits_is_bounded_for_each_tenant(monkeypatch):
    monkeypatch.setattr(fair_threads, "MAX_WAITING_BYTES", 100)
    async with tasks() as made:
        waiting = [made.start("a", 60), made.start("b", 60)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="things of 60 bytes wait to be processed"):
            await made.start("a", 60)
        made.open.set()
        await asyncio.gather(*waiting)
        await made.start("a", 60)


async def test_an_error_of_a_task_is_raised():
    threads = FairThreads(1, "things")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await threads.run(1, lambda: 1 // 0)
    threads.close()
