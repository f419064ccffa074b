"""Many watchers of a server's health."""

import asyncio

import pytest

from loraplex.frontends.kserve.grpc import health


@pytest.fixture
def asked():
    return []


@pytest.fixture
def watch(monkeypatch, asked):
    """A function that gives a watcher's statuses; `asked` is what the server answered."""
    monkeypatch.setattr(health, "WATCH_SECONDS", 0.01)

    async def is_ready():
        asked.append(asked[-1] if asked else True)
        return asked[-1]

    handlers = health.health_handler(is_ready)

    class Details:
        method = f"/{health.SERVICE}/Watch"
        invocation_metadata = ()

    behavior = handlers.service(Details()).unary_stream
    return lambda: behavior(health.HealthCheckRequest(), None)


async def test_all_are_told_each_change(watch, asked):
    watchers = [watch() for _ in range(5)]
    assert [(await anext(each)).status for each in watchers] == [health.SERVING] * 5
    asked.append(False)
    changes = await asyncio.gather(*map(anext, watchers))
    assert [change.status for change in changes] == [health.NOT_SERVING] * 5
    asked.append(True)
    assert (await anext(watchers[0])).status == health.SERVING


async def test_they_share_one_look(watch, asked):
    watchers = [watch() for _ in range(100)]
    for each in watchers:
        await anext(each)
    del asked[:-1]
    waiting = [asyncio.ensure_future(anext(each)) for each in watchers]
    await asyncio.sleep(0.2)
    assert 1 < len(asked) <= 21
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.sleep(0.05)
    num_asked = len(asked)
    await asyncio.sleep(0.05)
    assert len(asked) == num_asked, "nobody watches any more"
