"""A drain: what it refuses, what it waits for, how it ends."""

import asyncio

import pytest

from loraplex.core.clock import SystemClock
from loraplex.core.errors import NotReadyError
from loraplex.serving.draining import Draining
from support.naming import refused


class Engines:
    """So many requests are running; those that were ended are gone."""

    def __init__(self, running: int = 0) -> None:
        self.running = running
        self.errors: list[NotReadyError] = []

    def end_all(self, error: NotReadyError) -> None:
        self.errors.append(error)
        self.running = 0


@pytest.fixture
def engines():
    return Engines()


@pytest.fixture
async def draining(engines):
    draining = Draining(SystemClock(), lambda: engines.running, engines.end_all)
    yield draining
    draining.close()


async def test_nothing_is_refused_before(draining):
    with draining.admission():
        assert draining.num_in_flight == 1
    assert (draining.num_in_flight, draining.reason, draining.is_active) == (0, "", False)
    assert not draining.report().draining


async def test_new_requests_are_refused_and_may_come_again(draining):
    draining.begin()
    assert draining.reason == "the server is draining"
    with refused(NotReadyError, "draining") as caught, draining.admission():
        raise AssertionError
    assert caught.value.retry_after_seconds == 2
    assert draining.num_in_flight == 0
    assert not draining.cancel().draining
    with draining.admission():
        pass


async def test_the_log_mentions_a_drain_once(draining, caplog):
    caplog.set_level("INFO")
    draining.cancel()
    draining.begin()
    draining.begin(60)
    draining.cancel()
    assert caplog.messages == [
        "draining: new requests are refused; in flight: 0",
        "the drain is cancelled: requests are taken again",
    ]


async def test_a_request_that_is_being_admitted_is_in_work(draining):
    with draining.admission():
        assert not draining.begin().drained
    assert draining.report().drained


async def test_late_ones_are_ended(draining, engines):
    engines.running = 2
    report = draining.begin(0.02)
    assert (report.in_work, report.drained) == (2, False)
    assert 0 <= report.seconds_left <= 0.02
    async with asyncio.timeout(60):
        while not draining.report().drained:
            await asyncio.sleep(0.01)
    assert len(engines.errors) == 1


async def test_a_later_begin_sets_the_time_anew(draining, engines):
    engines.running = 1
    draining.begin(0.02)
    began = draining.report().elapsed_seconds
    assert draining.begin(60).seconds_left > 50
    assert draining.begin().seconds_left is None
    await asyncio.sleep(0.1)
    assert (engines.running, engines.errors) == (1, [])
    assert draining.report().elapsed_seconds > began


async def test_a_drain_that_was_undone_ends_nothing(draining, engines):
    engines.running = 1
    draining.begin(0.02)
    draining.cancel()
    await asyncio.sleep(0.1)
    assert engines.errors == []


async def test_the_last_drain(draining, engines):
    engines.running = 1
    finishing = asyncio.create_task(draining.finish(60))
    await asyncio.sleep(0)
    assert draining.reason == "the server is stopping"
    with refused(NotReadyError, "stopping"):
        draining.cancel()
    assert draining.begin(0).seconds_left > 50
    assert not finishing.done()
    engines.running = 0
    await asyncio.wait_for(finishing, 60)


async def test_the_last_drain_has_its_time(draining, engines, caplog):
    engines.running = 1
    await asyncio.wait_for(draining.finish(0.05), 60)
    assert "the shutdown grace period is over" in caplog.text
    assert engines.errors == []
