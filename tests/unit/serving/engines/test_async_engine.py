"""Starts, requests and ends of an engine, by script."""

import asyncio

import pytest

from loraplex.core.errors import (
    AdapterTooLargeError,
    ConfigError,
    InternalError,
    NotReadyError,
)
from loraplex.core.request import RequestBatch
from loraplex.core.stats import EngineStats
from loraplex.engine.messages import (
    AbortRequest,
    AdapterRejected,
    AddRequest,
    AddRequests,
    EngineFailed,
    PreloadAdapter,
    RegisterAdapter,
    StepDone,
)
from loraplex.serving.engines import async_engine
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.engine_state import EngineState
from loraplex.testing.fake_clock import FakeClock
from support.fake_loader import fake_source
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming, refused
from support.scripted_engine import (
    READY,
    done,
    error_of,
    until,
)

SOURCE = fake_source("digest", FAKE_CAPACITY.page_geometry)


class TestStart:
    async def test_gives_the_capacity(self, engine):
        assert engine.state is EngineState.STARTING
        assert not engine.is_ready
        assert await engine.start() == FAKE_CAPACITY == engine.capacity
        assert engine.is_ready

    async def test_raises_what_the_engine_says(self, engine, script):
        error = ConfigError("no weights here", param="path")
        script.first_events = [EngineFailed(error.to_info())]
        with pytest.raises(ConfigError, match="no weights here") as caught:
            await engine.start()
        assert caught.value.param == "path"
        assert engine.state is EngineState.FAILED
        assert engine.failure is caught.value
        assert len(script.links) == 1

    async def test_death_before_it_is_ready_is_an_error_and_no_loop(self, engine, script):
        script.first_events = [None]
        with refused(InternalError, "'m'"):
            await engine.start()
        assert engine.state is EngineState.FAILED
        assert len(script.links) == 1

    @pytest.mark.parametrize(
        ("error", "raised", "named"),
        [
            (ConfigError("TMPDIR is full"), ConfigError, ("TMPDIR",)),
            (OSError(11, "no more processes"), InternalError, ("[Errno 11]",)),
            (ZeroDivisionError(), InternalError, ("m", "given up")),
        ],
    )
    async def test_an_engine_that_cannot_be_spawned(self, engine, script, error, raised, named):
        script.errors = [error]
        with pytest.raises(raised, match=naming(*named)):
            await engine.start()
        assert engine.state is EngineState.FAILED

    async def test_nothing_is_taken_before_and_after_a_failed_start(
        self, engine, script, make_request
    ):
        script.first_events = [None]
        with refused(NotReadyError, "'m'", "starting") as caught:
            engine.submit(make_request(), [])
        assert caught.value.retry_after_seconds == 2
        with pytest.raises(InternalError):
            await engine.start()
        with refused(NotReadyError, "'m'", "failed"):
            engine.submit(make_request(), [])
        with pytest.raises(NotReadyError):
            engine.preload(SOURCE)


class TestRequests:
    async def test_a_request_gets_its_outputs(self, engine, script, make_request):
        await engine.start()
        request = make_request(5)
        stream = engine.submit(request, [])
        assert script.link.commands == [AddRequest(request)]
        assert engine.num_requests == 1
        script.link.say(done(5, 1, finished=False), done(6, 2), done(5, 3))
        first = await stream.take()
        assert first[0].deltas[0].token_ids == (1,)
        await until(lambda: engine.num_requests == 0)

    async def test_requests_of_a_batch_are_sent_together_when_it_is_closed(
        self, engine, script, make_request
    ):
        await engine.start()
        first, other, second = make_request(1, "digest"), make_request(2), make_request(3, "digest")
        with RequestBatch() as batch:
            engine.submit(first, [SOURCE], batch=batch)
            engine.submit(other, [])
            engine.submit(second, [SOURCE], batch=batch)
            assert script.link.commands == [AddRequest(other)]
        sent = [RegisterAdapter(SOURCE), AddRequests((first, second))]
        assert script.link.commands[1:] == sent

    async def test_a_batch_is_not_sent_if_one_of_its_requests_is_refused(
        self, engine, script, make_request
    ):
        await engine.start()
        batch = RequestBatch()
        engine.submit(make_request(1), [], batch=batch)
        batch.__exit__(ConfigError)
        engine.abort(1)
        await until(lambda: engine.num_requests == 0)
        assert script.link.commands == []

    async def test_a_request_waits_for_the_others_of_its_batch_however_long_they_take(
        self, engine, script, clock, make_request
    ):
        await engine.start()
        first, other, second = make_request(1), make_request(2), make_request(3)
        with RequestBatch() as batch:
            engine.submit(first, [], batch=batch)
            clock.advance_seconds(300)
            engine.requests._look_at_times()
            engine.submit(other, [])
            engine.submit(second, [], batch=batch)
            assert script.link.commands == [AddRequest(other)]
        assert script.link.commands[1:] == [AddRequests((first, second))]

    async def test_a_stream_that_was_left_collects_nothing(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(5), [])
        script.link.say(done(5, 1, finished=False))
        await stream.take()
        script.link.say(done(5, 2, finished=False))
        await until(lambda: bool(stream.pending))
        stream.leave()
        script.link.say(*(done(5, token, finished=token == 9) for token in range(3, 10)))
        await until(lambda: engine.num_requests == 0)
        assert stream.pending == []

    async def test_a_stream_that_passes_on_ends_with_its_reader(self, engine, script, make_request):
        await engine.start()
        stream, passed = engine.submit(make_request(5), []), []
        stream.pass_on(passed.append)
        script.link.say(done(5, 1, finished=False))
        await until(lambda: bool(passed))
        stream.leave()
        script.link.say(done(5, 2))
        await until(lambda: engine.num_requests == 0)
        assert [output.finished for output in passed] == [False]
        assert stream.pending == []

    async def test_a_slow_reader_finds_all_at_once(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(5), [])
        script.link.say(*(done(5, token, finished=token == 9) for token in range(10)))
        await until(lambda: engine.num_requests == 0)
        outputs = await stream.take()
        assert [o.deltas[0].token_ids for o in outputs] == [(token,) for token in range(10)]
        assert [o.finished for o in outputs] == [False] * 9 + [True]

    async def test_a_reader_may_be_cancelled_and_come_again(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(5), [])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.take(), 0.001)
        script.link.say(done(5, 1))
        assert len(await stream.take()) == 1

    async def test_adapters_are_registered_once_and_before_their_request(
        self, engine, script, make_request
    ):
        await engine.start()
        first, second = make_request(1, "digest"), make_request(2, "digest")
        engine.submit(first, [SOURCE])
        engine.submit(second, [SOURCE, SOURCE])
        engine.preload(SOURCE)
        assert script.link.commands == [
            RegisterAdapter(SOURCE),
            AddRequest(first),
            AddRequest(second),
            PreloadAdapter("digest"),
        ]

    async def test_what_the_engine_rejected_is_reported_from_then_on(
        self, engine, script, make_request
    ):
        await engine.start()
        engine.preload(SOURCE)
        error = AdapterTooLargeError("17 pages")
        script.link.say(AdapterRejected("digest", error.to_info()))
        await until(lambda: not engine.registered)
        with pytest.raises(AdapterTooLargeError, match="17 pages"):
            engine.submit(make_request(1, "digest"), [SOURCE])
        assert engine.num_requests == 0

    async def test_aborts_reach_the_engine_while_the_request_is_there(
        self, engine, script, make_request
    ):
        await engine.start()
        engine.submit(make_request(5, n=2), [])
        engine.abort(6)
        engine.abort(5, 1)
        engine.abort(5, 1)
        engine.abort(5)
        engine.abort(5)
        assert script.link.commands[1:] == [AbortRequest(5, 1), AbortRequest(5)]
        script.link.say(done(5))
        await until(lambda: engine.num_requests == 0)
        engine.abort(5)
        assert len(script.link.commands) == 3

    async def test_stats_and_steps_are_kept(self, engine, script):
        await engine.start()
        script.link.say(StepDone((), EngineStats(steps=3)))
        await until(lambda: engine.stats.steps == 3)
        assert len(engine.steps) == 0

    async def test_a_request_that_cannot_be_sent_leaves_no_stream(
        self, engine, script, make_request, monkeypatch
    ):
        await engine.start()
        monkeypatch.setattr(script.link, "send", lambda command: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.submit(make_request(), [])
        assert engine.num_requests == 0


class TestClose:
    async def test_before_the_start(self, script):
        engine = AsyncEngine("m", script, FakeClock())
        await engine.close()
        assert engine.state is EngineState.CLOSED

    @pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
    @pytest.mark.parametrize("first_events", [[], [READY]])
    async def test_while_starting(self, engine, script, first_events, num_turns):
        script.first_events = first_events
        start = asyncio.create_task(engine.start())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await engine.close()
        (result,) = await asyncio.gather(start, return_exceptions=True)
        assert isinstance(result, NotReadyError) or result == FAKE_CAPACITY
        assert engine.state is EngineState.CLOSED

    async def test_while_the_engine_is_being_spawned(self, engine, script):
        script.gate.clear()
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0.001)
        await engine.close()
        with refused(NotReadyError, "'m'", "stopped"):
            await start

    async def test_while_requests_are_in_work(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(), [])
        await engine.close()
        error = await error_of(stream)
        assert (error.code, error.message) == ("not_ready", "the server is stopping")
        assert script.link.is_closed
        with refused(NotReadyError, "'m'", "closed"):
            engine.submit(make_request(), [])
        engine.abort(1)

    async def test_while_restarting(self, engine, script, monkeypatch):
        await engine.start()
        monkeypatch.setattr(async_engine, "_LONGEST_PAUSE_SECONDS", 60.0)
        script.gate.clear()
        script.link.say(None)
        await until(lambda: engine.state is EngineState.RESTARTING)
        await engine.close()
        assert engine.state is EngineState.CLOSED
        assert len(script.links) == 1

    async def test_in_the_pause_before_a_restart(self, script, monkeypatch):
        monkeypatch.setattr(async_engine, "_FIRST_PAUSE_SECONDS", 60.0)
        engine = AsyncEngine("m", script, FakeClock())
        await engine.start()
        script.link.say(None)
        await until(lambda: engine.num_restarts == 1)
        async with asyncio.timeout(60):
            await engine.close()

    async def test_after_a_failed_start_and_twice(self, engine, script):
        script.first_events = [None]
        with pytest.raises(InternalError):
            await engine.start()
        await engine.close()
        await engine.close()

    async def test_no_task_is_left(self, engine):
        before = asyncio.all_tasks()
        await engine.start()
        await engine.close()
        assert asyncio.all_tasks() == before
