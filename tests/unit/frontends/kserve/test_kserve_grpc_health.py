"""Many watchers of a server's health."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.core.principal import LOCAL
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.grpc import health
from loraplex.frontends.kserve.grpc.calls import RpcCall


@pytest.fixture
def reported():
    return []


class Watcher:
    """In-flight RPC whose statuses come one by one."""

    def __init__(self, behavior) -> None:
        self._written: asyncio.Queue[Any] = asyncio.Queue(1)
        context = SimpleNamespace(write=self._written.put)
        call = RpcCall(context, {}, LOCAL, BodyMemory(), asyncio.current_task(), 60.0)
        self.task = asyncio.create_task(behavior(health.HealthCheckRequest(), call))

    async def next(self) -> int:
        return (await self._written.get()).status


@pytest.fixture
async def watch(monkeypatch, reported):
    """Return a function that makes a watcher; `reported` holds what the server sent."""
    monkeypatch.setattr(health, "WATCH_SECONDS", 0.01)

    def is_ready() -> bool:
        reported.append(reported[-1] if reported else True)
        return reported[-1]

    _, rpc = health.health_rpcs(is_ready)
    assert rpc.name == "/grpc.health.v1.Health/Watch"
    watchers: list[Watcher] = []

    def begin() -> Watcher:
        watchers.append(Watcher(rpc.behavior))
        return watchers[-1]

    yield begin
    for watcher in watchers:
        watcher.task.cancel()


async def test_all_watchers_receive_each_change(watch, reported):
    watchers = [watch() for _ in range(5)]
    assert [await each.next() for each in watchers] == [health.SERVING] * 5
    reported.append(False)
    changes = await asyncio.gather(*(each.next() for each in watchers))
    assert changes == [health.NOT_SERVING] * 5
    reported.append(True)
    assert await watchers[0].next() == health.SERVING


async def test_they_share_one_look(watch, reported):
    watchers = [watch() for _ in range(100)]
    for each in watchers:
        await each.next()
    del reported[:]
    start = time.monotonic()
    async with asyncio.timeout(60):
        while len(reported) < 5:
            await asyncio.sleep(0.01)
    assert len(reported) <= (time.monotonic() - start) / health.WATCH_SECONDS + 2
    for each in watchers:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in watchers), return_exceptions=True)
    await asyncio.sleep(0.05)
    num_reported = len(reported)
    await asyncio.sleep(0.05)
    assert len(reported) == num_reported, "no client watches any more"
