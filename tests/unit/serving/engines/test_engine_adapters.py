"""Registration messages to a scripted engine, and its reports about adapters."""

import asyncio

import pytest

from loraplex.core.errors import (
    AdapterTooLargeError,
    ErrorInfo,
    NotReadyError,
)
from loraplex.core.stats import AdapterActivity, EngineStats
from loraplex.engine.messages import (
    AdapterPinned,
    AdapterRejected,
    AdaptersReport,
    PinAdapter,
    QueryAdapters,
    RegisterAdapter,
    StepDone,
    UnpinAdapter,
)
from loraplex.serving.engines import queries
from support.fake_loader import fake_source
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming, refused
from support.scripted_engine import done, until

SOURCE = fake_source("digest", FAKE_CAPACITY.page_geometry)


class TestHeldAdapters:
    async def pin(self, engine, script, error=None):
        task = asyncio.create_task(engine.pin(SOURCE))
        await until(lambda: PinAdapter(1, "digest") in script.link.commands)
        script.link.say(AdapterPinned(1, error))
        await task

    async def test_held_and_released(self, engine, script):
        await engine.start()
        await self.pin(engine, script)
        assert engine.pinned == {"digest"}
        await engine.pin(SOURCE)
        engine.unpin("digest")
        engine.unpin("digest")
        assert script.link.commands == [
            RegisterAdapter(SOURCE),
            PinAdapter(1, "digest"),
            UnpinAdapter("digest"),
        ]
        assert engine.pinned == set()

    async def test_a_refusal_is_raised(self, engine, script):
        await engine.start()
        with pytest.raises(AdapterTooLargeError, match="3 of 4 pages"):
            await self.pin(engine, script, ErrorInfo("adapter_too_large", "3 of 4 pages"))
        assert engine.pinned == set()

    async def test_a_second_pin_gets_the_reply_to_the_first(self, engine, script):
        await engine.start()
        pins = [asyncio.create_task(engine.pin(SOURCE)) for _ in range(3)]
        await until(lambda: PinAdapter(1, "digest") in script.link.commands)
        assert not any(pin.done() for pin in pins)
        script.link.say(AdapterPinned(1, ErrorInfo("adapter_too_large", "3 of 4 pages")))
        results = await asyncio.gather(*pins, return_exceptions=True)
        assert [type(result) for result in results] == [AdapterTooLargeError] * 3
        assert script.link.commands == [RegisterAdapter(SOURCE), PinAdapter(1, "digest")]
        assert engine.pinned == set()

    async def test_a_pin_goes_on_while_a_caller_awaits_it(self, engine, script):
        await engine.start()
        first, second = (asyncio.create_task(engine.pin(SOURCE)) for _ in range(2))
        await until(lambda: PinAdapter(1, "digest") in script.link.commands)
        first.cancel()
        await asyncio.wait([first])
        assert engine.pinned == {"digest"}
        script.link.say(AdapterPinned(1))
        await second
        assert engine.pinned == {"digest"}

    async def test_a_pin_that_no_caller_awaits_is_undone(self, engine, script):
        await engine.start()
        pins = [asyncio.create_task(engine.pin(SOURCE)) for _ in range(2)]
        await until(lambda: PinAdapter(1, "digest") in script.link.commands)
        for pin in pins:
            pin.cancel()
        await until(lambda: engine.pinned == set())
        assert script.link.commands[-1] == UnpinAdapter("digest")

    async def test_a_pin_that_was_undone_meanwhile_is_no_success(self, engine, script):
        await engine.start()
        pin = asyncio.create_task(engine.pin(SOURCE))
        await until(lambda: PinAdapter(1, "digest") in script.link.commands)
        engine.unpin("digest")
        script.link.say(AdapterPinned(1))
        with pytest.raises(NotReadyError, match=naming("unpinned")):
            await pin

    async def test_a_pin_that_no_reply_confirmed_is_awaited(self, engine, script):
        """A pin for later, or one repeated for the next engine, may have been refused."""
        await engine.start()
        engine.pin_later(SOURCE)
        with pytest.raises(AdapterTooLargeError):
            await self.pin(engine, script, ErrorInfo("adapter_too_large", "3 of 4 pages"))
        assert engine.pinned == set()
        await engine.close()

    async def test_a_pin_that_waits_for_no_reply(self, engine, script):
        """While there is no engine, the next one gets it."""
        await engine.start()
        engine.pin_later(SOURCE)
        pins = [RegisterAdapter(SOURCE), PinAdapter(0, "digest")]
        assert script.link.commands == pins
        script.gate.clear()
        script.link.say(None)
        await until(lambda: not engine.is_ready)
        engine.unpin("digest")
        engine.pin_later(SOURCE)
        script.gate.set()
        await until(lambda: engine.is_ready)
        assert script.link.commands == pins

    async def test_the_next_engine_holds_it_too(self, engine, script):
        await engine.start()
        await self.pin(engine, script)
        script.link.say(None)
        await until(lambda: engine.is_ready and engine.num_restarts == 1)
        assert script.link.commands == [RegisterAdapter(SOURCE), PinAdapter(0, "digest")]

    async def test_an_engine_that_dies_meanwhile(self, engine, script):
        await engine.start()
        task = asyncio.create_task(engine.pin(SOURCE))
        await until(lambda: script.link.commands)
        script.link.say(None)
        with refused(NotReadyError, "'m'", "stopped"):
            await task
        assert engine.pinned == set()

    async def test_what_is_unloaded_is_pinned_no_longer(self, engine, script):
        await engine.start()
        await self.pin(engine, script)
        engine.forget_adapter("digest")
        assert engine.pinned == set()

    async def test_a_release_frees_capacity_for_what_was_rejected(
        self, engine, script, make_request
    ):
        await engine.start()
        await self.pin(engine, script)
        other = fake_source("other", FAKE_CAPACITY.page_geometry)
        engine.preload(other)
        script.link.say(AdapterRejected("other", ErrorInfo("adapter_too_large", "17 pages")))
        # The later preload finds no such adapter: that is not the reason.
        script.link.say(AdapterRejected("other", ErrorInfo("adapter_not_found", "no such")))
        script.link.say(StepDone((), EngineStats(steps=7)))
        await until(lambda: engine.stats.steps == 7)
        with pytest.raises(AdapterTooLargeError, match="17 pages"):
            engine.submit(make_request(1, "other"), [other])
        engine.unpin("digest")
        engine.submit(make_request(1, "other"), [other])
        assert script.link.commands.count(RegisterAdapter(other)) == 2


async def test_adapters_that_left_are_not_remembered(engine, script, make_request):
    """A server that lives for months unloads thousands of adapters that requests still use."""
    await engine.start()
    for number in range(1, 51):
        source = fake_source(f"{number}", FAKE_CAPACITY.page_geometry)
        engine.submit(make_request(number, source.digest), [source])
        engine.forget_adapter(source.digest)
        script.link.say(done(number, 1))
        await until(lambda: engine.num_requests == 0)
    assert len(engine._adapters._leaving) <= 1


class TestActivity:
    async def test_it_is_queried_between_two_steps(self, engine, script):
        await engine.start()
        task = asyncio.create_task(engine.recent_activity())
        await until(lambda: script.link.commands == [QueryAdapters(1)])
        activity = AdapterActivity(running={"digest": 2})
        script.link.say(AdaptersReport(1, activity, EngineStats(steps=5)))
        assert await task == activity
        assert engine.stats.steps == 5
        # During a long step: the latest report.
        assert await engine.recent_activity() == activity
        assert await engine.recent_activity() == activity

    async def test_without_an_engine(self, engine):
        assert await engine.recent_activity() == AdapterActivity()

    async def test_an_engine_that_dies_meanwhile(self, engine, script):
        await engine.start()
        task = asyncio.create_task(engine.residency())
        await until(lambda: script.link.commands)
        script.link.say(None)
        assert await task == {}


class TestSilentEngine:
    """An engine in a step that does not end."""

    @pytest.fixture(autouse=True)
    async def _impatient(self, engine, monkeypatch):
        monkeypatch.setattr(queries, "_REPLY_SECONDS", 0.3)
        await engine.start()

    async def test_a_query_ends_in_time(self, engine, script):
        with refused(NotReadyError, 0.3) as error:
            await engine.residency()
        assert error.value.retry_after_seconds == 5
        script.link.say(AdaptersReport(1, AdapterActivity()))  # too late, and does no harm

    async def test_a_pin_ends_in_time_and_is_undone(self, engine, script):
        with refused(NotReadyError, 0.3):
            await engine.pin(SOURCE)
        assert engine.pinned == set()
        assert script.link.commands[-1] == UnpinAdapter("digest")

    async def test_the_latest_report_needs_no_reply(self, engine):
        assert await engine.recent_activity() == AdapterActivity()
