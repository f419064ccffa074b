"""Engines that hang: what is noticed when, and what becomes of them."""

import asyncio
import os
import signal
import sys

import pytest

from loraplex.core.clock import SystemClock
from loraplex.core.errors import InternalError
from loraplex.engine.step_marker import Progress
from loraplex.serving.engines import async_engine, engine_watchdog
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.engine_state import EngineEnd, EngineState
from loraplex.serving.engines.engine_watchdog import EngineWatchdog, StepLimits, StepTimes
from loraplex.testing.fake_clock import FakeClock
from support.fake_engine_process import FakeEngineSettings, fake_engine_process
from support.naming import refused
from support.scripted_engine import ended, error_of, record_of, tokens_of, until

IN_STEP, IDLE = Progress(7, 4), Progress(7)


class Watched:
    """A watchdog, and a clock that moves between its looks."""

    def __init__(self, *limits: float, is_ready: bool = True) -> None:
        self.clock = FakeClock()
        self.dog = EngineWatchdog(self.clock, StepLimits(*limits))
        self.dog.begin()
        if is_ready:
            self.dog.note_ready()

    def measured(self, seconds: float, num_tokens: int = 4) -> None:
        self.dog.note_step(record_of(duration_ns=int(seconds * 1e9), num_tokens=num_tokens))

    def silence(self, progress: Progress, most: float = 10_000.0) -> float:
        """Return after how many seconds without progress the engine hangs."""
        assert not self.dog.problem(progress)
        seconds = 0.0
        while seconds < most:
            self.clock.advance_seconds(0.5)
            seconds += 0.5
            if self.dog.problem(progress):
                return seconds
        raise AssertionError("it was never noticed")


class TestLimits:
    def test_a_limit_that_is_set_applies_to_every_silence(self):
        assert Watched(5).silence(IN_STEP) == 5.5
        assert Watched(5).silence(IDLE) == 5.5

    def test_progress_ends_a_silence(self):
        watched = Watched(5)
        for num_beats in range(100):
            assert not watched.dog.problem(Progress(num_beats, 4))
            watched.clock.advance_seconds(1)
        assert watched.silence(Progress(100, 4)) == 5.5

    def test_the_derived_limit_has_a_lower_bound(self):
        watched = Watched(0, 3600, 12)
        watched.measured(0.001)
        assert watched.silence(IN_STEP) == 12.5

    def test_the_derived_limit_follows_the_slowest_recent_step(self):
        watched = Watched()
        for seconds in (0.1, 2.0, 0.1):
            watched.measured(seconds)
        assert watched.silence(IN_STEP) == 40.5
        for _ in range(100):
            watched.measured(0.1)
        assert watched.silence(Progress(8, 4)) == 10.5

    def test_a_long_prompt_has_more_time_than_the_steps_of_one_token_before_it(self):
        watched = Watched()
        for _ in range(1000):
            watched.measured(0.1, num_tokens=1)
        watched.measured(1, num_tokens=100)
        for _ in range(1000):
            watched.measured(0.1, num_tokens=1)
        assert watched.silence(Progress(7, 2000)) == 20 * 20 + 0.5

    def test_first_steps_and_starts_have_long_limits(self):
        assert Watched().silence(IN_STEP) == 300.5
        assert Watched(5, 600, is_ready=False).silence(Progress(0)) == 600.5

    def test_an_idle_engine_shows_that_it_is_alive(self):
        assert Watched().silence(IDLE) == 10.5

    def test_a_stopped_process_has_a_short_limit_also_at_its_start(self):
        assert Watched(0, 600, is_ready=False).silence(Progress(0, is_stopped=True)) == 10.5
        assert Watched().silence(Progress(7, 4, is_stopped=True)) == 10.5
        assert Watched(5).silence(Progress(7, 4, is_stopped=True)) == 5.5

    def test_a_process_that_was_stopped_late_in_its_start_has_that_limit_again(self):
        watched = Watched(0, 600, is_ready=False)
        for _ in range(100):
            assert not watched.dog.problem(Progress(0))
            watched.clock.advance_seconds(1)
        assert watched.silence(Progress(0, is_stopped=True)) == 10.5

    def test_the_next_engine_starts_anew(self):
        watched = Watched(5, 600)
        watched.silence(IN_STEP)
        watched.dog.begin()
        assert watched.silence(IN_STEP) == 600.5

    def test_a_clock_that_jumps_ends_no_engine(self):
        """Serving was stopped itself, or its event loop was busy: it saw nothing of that time."""
        watched = Watched(10)
        for _ in range(5):
            assert not watched.dog.problem(IN_STEP)
            watched.clock.advance_seconds(3600)
        assert not watched.dog.problem(IN_STEP)

    def test_steps_without_tokens_measure_nothing(self):
        times = StepTimes()
        times.note(record_of(duration_ns=1))
        assert times.expected_seconds(1) is None


@pytest.fixture
def hanging(script, monkeypatch):
    """An engine whose steps may take two seconds, and its clock."""
    monkeypatch.setattr(async_engine, "LOOK_SECONDS", 0.001)
    clock = FakeClock()
    engine = AsyncEngine("m", script, clock, watchdog=EngineWatchdog(clock, StepLimits(2.0)))
    return engine, clock


async def look(engine: AsyncEngine, clock: FakeClock) -> None:
    """Let 0.6 seconds pass, and the watchdog look."""
    clock.advance_seconds(0.6)
    await until(lambda: engine._watchdog._looked_ns == clock.now_ns())


async def hang(engine: AsyncEngine, script, clock: FakeClock) -> None:
    """Let the running engine be killed for making no progress, and wait for the next one."""
    link, num_links = script.link, len(script.links)
    while not link.problem:
        await look(engine, clock)
    await until(lambda: len(script.links) > num_links and engine.is_ready)


class TestHungEngines:
    async def test_it_is_not_ready_and_replaced(self, hanging, script, make_request, caplog):
        engine, clock = hanging
        await engine.start()
        stream = engine.submit(make_request(), [])
        script.gate.clear()
        await look(engine, clock)
        await look(engine, clock)
        assert engine.is_ready
        while not script.link.problem:
            await look(engine, clock)
        assert engine.state is EngineState.RESTARTING
        await until(lambda: "for more than 2 s" in engine.problem)
        script.gate.set()
        await until(lambda: engine.is_ready)
        assert engine.restarts == {EngineEnd.HANG: 1}
        assert not engine.problem
        assert script.links[0].is_closed
        assert "m: hung: no progress between two steps for more than 2 s" in caplog.text
        assert engine.num_requests == 1
        await engine.close()
        assert (await error_of(stream)).code == "not_ready"

    async def test_a_start_that_hangs_is_an_error(self, script, monkeypatch, caplog):
        monkeypatch.setattr(async_engine, "LOOK_SECONDS", 0.001)
        clock = FakeClock()
        dog = EngineWatchdog(clock, StepLimits(start_seconds=2.0))
        engine = AsyncEngine("m", script, clock, watchdog=dog)
        script.first_events = []
        start = asyncio.create_task(engine.start())
        await until(lambda: bool(script.links))
        while not script.link.problem:
            await look(engine, clock)
        with refused(InternalError, "'m'"):
            await start
        assert "hung: no progress at its start for more than 2 s" in caplog.text
        await engine.close()

    async def test_a_request_in_two_hung_steps_ends_with_its_own_error(
        self, hanging, script, make_request
    ):
        engine, clock = hanging
        await engine.start()
        guilty = engine.submit(make_request(1), [])
        innocent = engine.submit(make_request(2), [])
        for _ in range(2):
            script.link.in_flight = (1,)
            await hang(engine, script, clock)
        error = await error_of(guilty)
        assert error.code == "request_crashed_engine"
        assert "hung" in error.message
        assert engine.num_requests == 1
        await engine.close()
        assert (await error_of(innocent)).code == "not_ready"


@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
async def test_a_link_reports_that_its_process_is_stopped(temporary_folder):
    engine = AsyncEngine("m", fake_engine_process(FakeEngineSettings()), SystemClock())
    await engine.start()
    link = engine._link
    for number, is_stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        os.kill(link.pid, number)
        await until(lambda: link.progress().is_stopped is is_stopped)  # noqa: B023
    await engine.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
async def test_a_stopped_process_is_killed_and_its_requests_continue(
    temporary_folder, make_request, monkeypatch, caplog
):
    monkeypatch.setattr(engine_watchdog, "_IDLE_SECONDS", 3.0)
    clock = SystemClock()
    settings = FakeEngineSettings(step_seconds=0.02)
    watchdog = EngineWatchdog(clock, StepLimits(least_seconds=3.0))
    engine = AsyncEngine("m", fake_engine_process(settings), clock, watchdog=watchdog)
    await engine.start()
    request = make_request(1, max_tokens=30)
    expected = await tokens_of(engine.submit(request, []))
    stream = engine.submit(request, [])
    first = await stream.take()
    os.kill(engine._link.pid, signal.SIGSTOP)
    assert await tokens_of(stream, first) == expected
    assert engine.num_restarts == 1
    assert "hung: no progress" in caplog.text
    os.kill(engine._link.pid, signal.SIGSTOP)  # without a request
    await until(lambda: not engine.is_ready)
    await until(lambda: engine.is_ready)
    assert len((await ended(engine.submit(make_request(2), [])))[-1].deltas) == 1
    await engine.close()
