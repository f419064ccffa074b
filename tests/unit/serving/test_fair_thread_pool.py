"""Tenants take turns in threads, however many tasks one of them has."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from loraplex.serving.fair_thread_pool import FairThreadPool
from support.wire_requests import of_tenant


class Tasks:
    """Tasks of tenants, and the order in which they ran, once they may."""

    def __init__(self) -> None:
        self.pool = FairThreadPool(1)
        self.ran: list[str] = []
        self.may_run = threading.Event()

    def submit(self, tenant: str) -> Future[None]:
        with of_tenant(tenant):
            return self.pool.submit(self._run, tenant)

    def _run(self, tenant: str) -> None:
        assert self.may_run.wait(60)
        self.ran.append(tenant)


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    made = Tasks()
    yield made
    made.may_run.set()
    made.pool.shutdown()


def test_another_tenant_waits_for_one_task_of_each(tasks):
    first = tasks.submit("a")
    while not first.running():
        pass
    submitted = [tasks.submit("a") for _ in range(10_000)]
    submitted += [tasks.submit(tenant) for tenant in ("b", "c", "b")]
    tasks.may_run.set()
    for each in submitted:
        each.result(60)
    assert tasks.ran[:6] == ["a", "a", "b", "c", "a", "b"]
    assert len(tasks.ran) == 10_004


def test_a_cancelled_task_does_not_run(tasks):
    first = tasks.submit("a")
    while not first.running():
        pass
    cancelled, last = tasks.submit("a"), tasks.submit("b")
    assert cancelled.cancel()
    assert not first.cancel()
    tasks.may_run.set()
    last.result(60)
    assert tasks.ran == ["a", "b"]


async def test_it_is_an_executor_of_the_event_loop():
    loop = asyncio.get_running_loop()
    loop.set_default_executor(FairThreadPool())
    assert await asyncio.gather(*(asyncio.to_thread(pow, 2, n) for n in range(50))) == [
        2**n for n in range(50)
    ]
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(divmod, 1, 0)


def test_a_pool_that_was_shut_down_takes_no_task(tasks):
    tasks.pool.shutdown()
    with pytest.raises(RuntimeError):
        tasks.submit("a")
