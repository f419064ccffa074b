"""Requests across the lives of an engine: by a script, and with a process that is killed."""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.clock import SystemClock
from loraplex.core.errors import (
    AdapterTooLargeError,
    ConfigError,
    ErrorInfo,
    InternalError,
    NotReadyError,
)
from loraplex.core.output import EngineOutput, FinishReason, RequestTiming, SequenceDelta
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord
from loraplex.engine.messages import (
    AbortRequest,
    AdapterHeld,
    AdapterRejected,
    AdaptersTold,
    AddRequest,
    AskAdapters,
    EngineFailed,
    EngineReady,
    HoldAdapter,
    PreloadAdapter,
    RegisterAdapter,
    ReleaseAdapter,
    StepDone,
    UnregisterAdapter,
)
from loraplex.serving.engines import async_engine
from loraplex.serving.engines.async_engine import AsyncEngine, EngineState
from loraplex.serving.engines.link import EngineDied, ThreadLink
from loraplex.serving.engines.output_stream import OutputStream
from loraplex.serving.engines.replay import MOST_BLAME, MOST_DEATHS, PLACE_OUTPUTS, SUSPECT_BLAME
from loraplex.serving.engines.request_fates import Patience
from loraplex.testing.fake_clock import FakeClock
from loraplex.testing.fake_engine_process import (
    FakeEngineSettings,
    fake_engine_process,
    fake_engine_thread,
)
from loraplex.testing.fake_loader import fake_source
from loraplex.testing.fake_runner import FAKE_CAPACITY

READY = EngineReady(FAKE_CAPACITY)
MARK = StepDone((), EngineStats(steps=77))
SOURCE = fake_source("digest", FAKE_CAPACITY.page_geometry)


class ScriptedLink:
    """An engine that says what a test puts into `events`; None is its death."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.events: asyncio.Queue = asyncio.Queue()
        self.commands: list = []
        self.is_closed = False

    def send(self, command) -> None:
        self.commands.append(command)

    async def receive(self):
        event = await self.events.get()
        if event is None:
            raise EngineDied("by script")
        if isinstance(event, Exception):
            raise event
        return event

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True

    def say(self, *events) -> None:
        for event in events:
            self.events.put_nowait(event)


class Script:
    """Starts ScriptedLinks, or raises `errors` first, one for each start."""

    def __init__(self) -> None:
        self.links: list[ScriptedLink] = []
        self.errors: list[Exception] = []
        self.first_events: list = [READY]
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, epoch: int) -> ScriptedLink:
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.links.append(ScriptedLink(epoch))
        self.links[-1].say(*self.first_events)
        return self.links[-1]

    @property
    def link(self) -> ScriptedLink:
        return self.links[-1]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(async_engine, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def script():
    return Script()


@pytest.fixture
async def engine(script):
    engine = AsyncEngine("m", script, FakeClock())
    yield engine
    await engine.close()
    assert all(link.is_closed for link in script.links)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def ended(stream: OutputStream) -> list[EngineOutput]:
    """All outputs up to the last."""
    outputs: list[EngineOutput] = []
    while not (outputs and outputs[-1].finished):
        outputs += await stream.take()
    return outputs


async def tokens_of(stream: OutputStream, outputs: Sequence[EngineOutput] = ()) -> dict:
    """By sequence, of a request that ends without an error. outputs: what was taken before."""
    outputs = [*outputs]
    outputs += [] if outputs and outputs[-1].finished else await ended(stream)
    assert outputs[-1].error is None
    tokens: dict[int, list[int]] = {}
    for delta in (delta for output in outputs for delta in output.deltas):
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


async def error_of(stream: OutputStream) -> ErrorInfo:
    outputs = await stream.take()
    assert outputs[-1].finished
    return outputs[-1].error


def says(request_id: int, *deltas: tuple, finished: bool = False, **fields) -> StepDone:
    """deltas: (index, token ids ..., perhaps a finish reason)."""
    made = []
    for index, *rest in deltas:
        reason = rest.pop() if isinstance(rest[-1], FinishReason) else None
        made.append(SequenceDelta(index, tuple(rest), finish_reason=reason))
    output = EngineOutput(request_id, tuple(made), finished=finished, **fields)
    return StepDone((output,), EngineStats(steps=1))


def step_of(*request_ids: int) -> StepDone:
    """A step that had rows of them, and nothing to say."""
    numbers = dict.fromkeys(StepRecord.__struct_fields__[:16], 0)
    return StepDone((), EngineStats(), StepRecord(**(numbers | {"request_ids": request_ids})))


def died(*in_flight: int, was_killed: bool = False) -> EngineDied:
    return EngineDied("by script", in_flight, was_killed=was_killed)


def done(request_id: int, *token_ids: int, finished: bool = True, **fields) -> StepDone:
    output = EngineOutput(
        request_id, (SequenceDelta(0, token_ids),) if token_ids else (), finished=finished, **fields
    )
    return StepDone((output,), EngineStats(steps=1))


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
        with pytest.raises(InternalError, match="'m' ended while it started"):
            await engine.start()
        assert engine.state is EngineState.FAILED
        assert len(script.links) == 1

    @pytest.mark.parametrize(
        ("error", "raised", "text"),
        [
            (ConfigError("TMPDIR is full"), ConfigError, "TMPDIR is full"),
            (OSError(11, "no more processes"), InternalError, "no more processes"),
            (ZeroDivisionError(), InternalError, "given up"),
        ],
    )
    async def test_an_engine_that_cannot_be_spawned(self, engine, script, error, raised, text):
        script.errors = [error]
        with pytest.raises(raised, match=text):
            await engine.start()
        assert engine.state is EngineState.FAILED

    async def test_nothing_is_taken_before_and_after_a_failed_start(
        self, engine, script, make_request
    ):
        script.first_events = [None]
        with pytest.raises(NotReadyError, match="is starting") as caught:
            engine.submit(make_request(), [])
        assert caught.value.retry_after_seconds == 2
        with pytest.raises(InternalError):
            await engine.start()
        with pytest.raises(NotReadyError, match="is failed"):
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

    async def test_what_the_engine_rejected_is_told_from_then_on(
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


class TestRestart:
    async def test_a_request_goes_on_in_the_next_engine(self, engine, script, make_request):
        await engine.start()
        script.link.say(StepDone((), EngineStats(num_running=2)))
        request = make_request(1, "digest", n=2, requires_resident=True)
        stream = engine.submit(request, [SOURCE])
        script.gate.clear()
        timing = RequestTiming(request.arrival_ns, first_token_ns=7, num_preemptions=1)
        script.link.say(
            says(1, (0, 11, 12), (1, 21), timing=timing, prompt_logprobs=(None,)),
            says(1, (1, 22, FinishReason.LENGTH)),
            died(1),
        )
        await until(lambda: engine.state is EngineState.RESTARTING)
        assert not engine.is_ready
        assert engine.stats == EngineStats()
        assert engine.num_requests == 1
        script.gate.set()
        await until(lambda: engine.is_ready)
        assert [link.epoch for link in script.links] == [1, 2]
        assert script.links[0].is_closed
        assert engine.num_restarts == 1
        again = msgspec.structs.replace(
            request,
            outputs=((11, 12), (21, 22)),
            ended=(1,),
            prompt_scores_told=True,
            requires_resident=False,
            num_restarts=1,
        )
        assert script.link.commands == [RegisterAdapter(SOURCE), AddRequest(again)]
        timing = RequestTiming(5, first_token_ns=9, num_preemptions=1, num_restarts=1)
        script.link.say(says(1, (0, 13, FinishReason.STOP), finished=True, timing=timing))
        await until(lambda: engine.num_requests == 0)
        outputs = await stream.take()
        tokens = [(d.index, d.token_ids) for output in outputs for d in output.deltas]
        assert tokens == [(0, (11, 12)), (1, (21,)), (1, (22,)), (0, (13,))]
        assert outputs[-1].timing.first_token_ns == 7
        assert outputs[-1].timing.num_preemptions == 2
        assert outputs[-1].timing.num_restarts == 1

    async def test_a_request_may_survive_several_engines(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(1, max_tokens=99), [])
        for number in range(1, 15):
            script.link.say(*[says(1, (0, number))] * PLACE_OUTPUTS, died(1))
            await until(lambda: engine.is_ready and engine.num_restarts == number)  # noqa: B023
            (add,) = script.link.commands
            assert len(add.request.outputs[0]) == PLACE_OUTPUTS * number
            assert add.request.num_restarts == number
        script.link.say(says(1, (0, 99), finished=True))
        await until(lambda: engine.num_requests == 0)
        outputs = await stream.take()
        tokens = [t for o in outputs for d in o.deltas for t in d.token_ids]
        assert tokens == [n for n in range(1, 15) for _ in range(PLACE_OUTPUTS)] + [99]

    async def test_what_is_submitted_meanwhile_waits(self, engine, script, make_request):
        await engine.start()
        script.gate.clear()
        script.link.say(died())
        await until(lambda: engine.state is EngineState.RESTARTING)
        request = make_request(2, "digest")
        stream = engine.submit(request, [SOURCE])
        script.gate.set()
        await until(lambda: engine.is_ready)
        assert script.link.commands == [RegisterAdapter(SOURCE), AddRequest(request)]
        script.link.say(done(2, 5))
        assert (await stream.take())[-1].deltas[0].token_ids == (5,)

    async def test_aborts_need_no_engine(self, engine, script, make_request):
        await engine.start()
        whole = engine.submit(make_request(1, n=2), [])
        part = engine.submit(make_request(2, n=2), [])
        asked = engine.submit(make_request(3), [])
        engine.abort(3)  # the engine does not come to it any more
        script.gate.clear()
        script.link.say(died(1, 2, 3))
        await until(lambda: engine.state is EngineState.RESTARTING)
        engine.abort(1)
        engine.abort(2, 1)
        ends = [(d.index, d.finish_reason) for d in (await whole.take())[-1].deltas]
        assert ends == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
        (output,) = await part.take()
        assert not output.finished
        assert (await asked.take())[-1].finished
        script.gate.set()
        await until(lambda: engine.is_ready)
        (add,) = script.link.commands
        assert (add.request.request_id, add.request.ended) == (2, (1,))
        engine.abort(2)
        assert script.link.commands[1:] == [AbortRequest(2)]

    async def test_an_adapter_that_was_unloaded_meanwhile(self, engine, script, make_request):
        """Its request needs it in the next engine, too; nobody else gets it there."""
        await engine.start()
        engine.submit(make_request(1, "digest"), [SOURCE])
        engine.forget_adapter("digest")
        assert engine.registered == {"digest"}, "its file must stay"
        script.link.say(died(1, was_killed=True))
        await until(lambda: engine.is_ready and engine.num_restarts == 1)
        register, add, unregister = script.link.commands
        assert (register, unregister) == (RegisterAdapter(SOURCE), UnregisterAdapter("digest"))
        assert add.request.request_id == 1
        engine.submit(make_request(2, "digest"), [SOURCE])
        assert script.link.commands[3] == RegisterAdapter(SOURCE)
        script.link.say(died(1, 2, was_killed=True))
        await until(lambda: engine.is_ready and engine.num_restarts == 2)
        assert UnregisterAdapter("digest") not in script.link.commands

    async def test_a_deadline_holds_without_an_engine(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(1, deadline_ns=engine._clock.now_ns() + 10**9), [])
        patient = engine.submit(make_request(2), [])
        script.gate.clear()
        script.link.say(says(1, (0, 5)), died(1))
        await until(lambda: engine.state is EngineState.RESTARTING)
        assert (await stream.take())[-1].deltas
        engine._clock.advance_seconds(2)
        error = await error_of(stream)
        assert error.code == "deadline_exceeded"
        assert "1 new tokens" in error.message
        script.gate.set()
        await until(lambda: engine.is_ready)
        script.link.say(done(2, 5))
        assert (await patient.take())[-1].error is None

    async def test_an_engine_that_does_not_come_back(self, script, make_request):
        """What came since then is told early, what had been accepted late."""
        engine = AsyncEngine("m", script, FakeClock(), patience=Patience(30, 10))
        await engine.start()
        accepted = engine.submit(make_request(1), [])
        script.gate.clear()
        script.link.say(died(1))
        await until(lambda: engine.state is EngineState.RESTARTING)
        new = engine.submit(make_request(2), [])
        engine._clock.advance_seconds(11)
        error = await error_of(new)
        assert (error.code, error.retry_after_seconds) == ("not_ready", 5)
        assert engine.num_requests == 1
        engine._clock.advance_seconds(20)
        assert (await error_of(accepted)).code == "engine_restarted"
        await engine.close()

    async def test_it_tries_until_an_engine_is_there(self, engine, script):
        await engine.start()
        script.errors = [OSError("no more processes"), ConfigError("not now")]
        script.link.say(EngineFailed(ErrorInfo("invalid_config", "gone")), None)
        await until(lambda: engine.num_restarts == 3 and engine.is_ready)
        assert engine.failure is None

    async def test_pauses_grow_unless_an_engine_was_of_use(self, script, monkeypatch):
        pauses: list[float] = []
        sleep = asyncio.sleep

        async def record(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        clock = FakeClock()
        engine = AsyncEngine("m", script, clock)
        monkeypatch.setattr(async_engine, "_FIRST_PAUSE_SECONDS", 8.0)
        await engine.start()
        monkeypatch.setattr(async_engine.asyncio, "sleep", record)
        for lived_seconds, has_worked in ((1, 0), (1, 0), (1, 0), (1, 0), (61, 0), (60, 0), (1, 1)):
            num_restarts = engine.num_restarts
            clock.advance_seconds(lived_seconds)
            script.link.say(*[step_of(1)] * has_worked, None)
            while engine.num_restarts == num_restarts or not engine.is_ready:
                await sleep(0)
        assert [pause for pause in pauses if pause] == [8, 16, 30, 30, 8, 16, 8]
        await engine.close()

    async def test_an_event_that_cannot_be_read_gives_the_engine_up(
        self, engine, script, make_request
    ):
        await engine.start()
        stream = engine.submit(make_request(1), [])
        script.link.say(ValueError("not msgpack"))
        assert (await error_of(stream)).code == "engine_restarted"
        await until(lambda: engine.state is EngineState.FAILED)
        assert script.link.is_closed


class TestSuspects:
    """A request that crashes its engine, beside others."""

    def requests_of(self, script):
        return [c.request.request_id for c in script.link.commands if isinstance(c, AddRequest)]

    async def restart(self, engine, script, *in_flight, was_killed=False):
        number = engine.num_restarts + 1
        script.link.say(died(*in_flight, was_killed=was_killed))
        await until(lambda: engine.is_ready and engine.num_restarts == number)

    async def test_they_come_back_one_at_a_time(self, engine, script, make_request):
        await engine.start()
        streams = {id_: engine.submit(make_request(id_), []) for id_ in (1, 2, 3, 4)}
        await self.restart(engine, script, 1, 2, 3)
        assert self.requests_of(script) == [1]
        engine.submit(make_request(5), [])
        assert self.requests_of(script) == [1]
        script.link.say(*[says(1, (0, 11))] * (PLACE_OUTPUTS - 1), MARK)
        await until(lambda: engine.stats.steps == 77)
        assert self.requests_of(script) == [1]
        script.link.say(says(1, (0, 11)))
        await until(lambda: self.requests_of(script) == [1, 2])
        await self.restart(engine, script, 1, 2)
        assert (await error_of(streams[2])).code == "request_crashed_engine"
        # The one that merely ran beside it is at another place now: it is one more suspect.
        assert self.requests_of(script) == [1]
        script.link.say(*[says(1, (0, 12))] * PLACE_OUTPUTS)
        await until(lambda: self.requests_of(script) == [1, 3])
        script.link.say(done(3, 31))
        await until(lambda: self.requests_of(script) == [1, 3, 4, 5])
        assert (await streams[3].take())[-1].error is None

    async def test_a_suspect_that_leaves_makes_room(self, engine, script, make_request):
        await engine.start()
        streams = [engine.submit(make_request(id_), []) for id_ in (1, 2, 3)]
        await self.restart(engine, script, 1, 2)
        engine.abort(3)  # not known to this engine
        assert (await streams[2].take())[-1].finished
        engine.abort(1)
        assert script.link.commands[1:] == [AbortRequest(1)]
        script.link.say(done(1))
        await until(lambda: self.requests_of(script) == [1, 2])

    async def test_every_sequence_must_get_beyond_the_place(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(1, n=2), [])
        await self.restart(engine, script, 1)
        script.link.say(*[says(1, (0, 11))] * PLACE_OUTPUTS)
        await stream.take()
        await self.restart(engine, script, 1)
        assert (await error_of(stream)).code == "request_crashed_engine"

    async def test_what_was_computed_and_not_told_does_not_count(
        self, engine, script, make_request
    ):
        """An engine that crashes may be three tokens further than what it could say."""
        await engine.start()
        stream = engine.submit(make_request(1), [])
        await self.restart(engine, script, 1)
        script.link.say(*[says(1, (0, 11))] * 3)
        await stream.take()
        await self.restart(engine, script, 1)
        assert (await error_of(stream)).code == "request_crashed_engine"

    async def test_kills_from_outside_weigh_less(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(1), [])
        engine.submit(make_request(2), [])
        for _ in range(2):
            await self.restart(engine, script, 1, 2, was_killed=True)
            assert self.requests_of(script) == [1, 2]
        for _ in range(3):
            await self.restart(engine, script, 1, was_killed=True)
            assert self.requests_of(script) == [1]
        assert engine.num_requests == 2
        await self.restart(engine, script, 1, was_killed=True)
        assert (await error_of(stream)).code == "request_crashed_engine"
        assert self.requests_of(script) == [2]

    async def test_a_beam_search_gets_beyond_it_by_steps(self, engine, script, make_request):
        await engine.start()
        sampling = SamplingParams(max_tokens=9, beam=BeamSearch(width=2), seed=0)
        engine.submit(make_request(1, sampling=sampling), [])
        engine.submit(make_request(2), [])
        script.link.say(*(step_of(1) for _ in range(3)))
        await self.restart(engine, script, 1)
        assert script.link.commands[0].request.outputs == ()
        script.link.say(*(step_of(1) for _ in range(3 + PLACE_OUTPUTS)), MARK)
        await until(lambda: engine.stats.steps == 77)
        assert self.requests_of(script) == [1]
        script.link.say(step_of(1))
        await until(lambda: self.requests_of(script) == [1, 2])

    async def test_deaths_without_a_step_end_at_last(self, engine, script, make_request):
        """An adapter whose load kills the engine while others compute, for one."""
        await engine.start()
        stream = engine.submit(make_request(1), [])
        engine.submit(make_request(2, max_tokens=999), [])
        for _ in range(MOST_DEATHS - 1):
            await self.restart(engine, script, 2, was_killed=True)
            assert self.requests_of(script) == [1, 2]
            script.link.say(*[says(2, (0, 5))] * PLACE_OUTPUTS)
        await self.restart(engine, script, 2, was_killed=True)
        assert (await error_of(stream)).code == "engine_restarted"
        assert self.requests_of(script) == [2]

    async def test_a_crash_between_two_steps_blames_all_a_little(
        self, engine, script, make_request
    ):
        await engine.start()
        engine.submit(make_request(1), [])
        poison = engine.submit(make_request(2), [])
        for _ in range(SUSPECT_BLAME - 1):
            await self.restart(engine, script)
            assert self.requests_of(script) == [1, 2]
        await self.restart(engine, script)
        assert self.requests_of(script) == [1]
        script.link.say(*[says(1, (0, 5))] * PLACE_OUTPUTS)
        await until(lambda: self.requests_of(script) == [1, 2])
        for _ in range(MOST_BLAME - SUSPECT_BLAME - 1):
            await self.restart(engine, script)
            assert self.requests_of(script) == [2]
        await self.restart(engine, script)
        assert (await error_of(poison)).code == "request_crashed_engine"
        assert self.requests_of(script) == [1]


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
        with pytest.raises(NotReadyError, match="stopped as it started"):
            await start

    async def test_while_requests_are_in_work(self, engine, script, make_request):
        await engine.start()
        stream = engine.submit(make_request(), [])
        await engine.close()
        error = await error_of(stream)
        assert (error.code, error.message) == ("not_ready", "the server is stopping")
        assert script.link.is_closed
        with pytest.raises(NotReadyError, match="is closed"):
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
        async with asyncio.timeout(20):
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


class TestRealEngines:
    @pytest.mark.parametrize("factory", [fake_engine_thread, fake_engine_process])
    async def test_close_leaves_nothing(self, factory, temporary_folder, make_request, capfd):
        threads = set(threading.enumerate())
        engine = AsyncEngine("m", factory(), SystemClock())
        await engine.start()
        stream = engine.submit(make_request(1, "digest"), [SOURCE])
        tokens = []
        while not (outputs := await stream.take())[-1].finished:
            tokens += [t for o in outputs for d in o.deltas for t in d.token_ids]
        await engine.close()
        left = {t.name for t in set(threading.enumerate()) - threads if "loraplex" in t.name}
        assert left == set()
        assert capfd.readouterr().err == ""

    async def test_a_killed_process(self, temporary_folder, make_request):
        settings = FakeEngineSettings(step_seconds=0.02)
        engine = AsyncEngine("m", fake_engine_process(settings), SystemClock())
        await engine.start()
        requests = [make_request(i, "digest", n=2, max_tokens=30) for i in (1, 2)]
        expected = [await tokens_of(engine.submit(request, [SOURCE])) for request in requests]
        streams = [engine.submit(request, [SOURCE]) for request in requests]
        first = [await stream.take() for stream in streams]
        os.kill(engine._link.pid, signal.SIGKILL)
        for stream, outputs, tokens in zip(streams, first, expected, strict=True):
            assert await tokens_of(stream, outputs) == tokens
        assert engine.num_restarts == 1
        await engine.close()

    async def test_a_request_that_crashes_its_process(self, temporary_folder, make_request):
        """It costs two crashes, and nobody else's answer."""
        calm = AsyncEngine("m", fake_engine_thread(), SystemClock())
        await calm.start()
        requests = [make_request(i, max_tokens=12) for i in range(1, 7)]
        expected = [await tokens_of(calm.submit(request, [])) for request in requests]
        await calm.close()
        settings = FakeEngineSettings(step_seconds=0.005, poison_prompt=(9, 9), poison_output=4)
        engine = AsyncEngine("m", fake_engine_process(settings), SystemClock())
        await engine.start()
        streams = [engine.submit(request, []) for request in requests[:3]]
        poison = engine.submit(make_request(9, prompt_token_ids=(9, 9), max_tokens=12), [])
        streams += [engine.submit(request, []) for request in requests[3:]]
        for stream, tokens in zip(streams, expected, strict=True):
            assert await tokens_of(stream) == tokens
        outputs = await ended(poison)
        assert outputs[-1].error.code == "request_crashed_engine"
        assert sum(len(d.token_ids) for o in outputs for d in o.deltas) <= 4
        assert engine.num_restarts == 2
        assert (await tokens_of(engine.submit(requests[0], []))) == expected[0]
        await engine.close()

    async def test_an_adapter_that_kills_its_process(self, temporary_folder, make_request):
        """It costs six crashes, and nobody else's answer."""
        calm = AsyncEngine("m", fake_engine_thread(), SystemClock())
        await calm.start()
        requests = [make_request(i, max_tokens=60) for i in range(1, 4)]
        expected = [await tokens_of(calm.submit(request, [])) for request in requests]
        await calm.close()
        settings = FakeEngineSettings(step_seconds=0.002, poison_adapter="digest")
        engine = AsyncEngine("m", fake_engine_process(settings), SystemClock())
        await engine.start()
        streams = [engine.submit(request, []) for request in requests]
        poison = engine.submit(make_request(9, "digest"), [SOURCE])
        for stream, tokens in zip(streams, expected, strict=True):
            assert await tokens_of(stream) == tokens
        assert (await ended(poison))[-1].error.code == "request_crashed_engine"
        assert engine.num_restarts <= MOST_BLAME
        await engine.close()

    async def test_a_process_that_cannot_start(self, temporary_folder):
        failure = ConfigError("max_model_len is too long").to_info()
        engine = AsyncEngine(
            "m", fake_engine_process(FakeEngineSettings(failure=failure)), SystemClock()
        )
        with pytest.raises(ConfigError, match="max_model_len is too long"):
            await engine.start()
        await engine.close()

    async def test_closing_a_process_that_starts(self, temporary_folder):
        engine = AsyncEngine(
            "m", fake_engine_process(FakeEngineSettings(start_seconds=60)), SystemClock()
        )
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            await engine.close()
        with pytest.raises(NotReadyError):
            await start

    async def test_a_thread_that_fails_is_replaced(self, make_request, caplog):
        lives = []

        async def start(epoch):
            healthy = await fake_engine_thread()(epoch)
            lives.append(healthy)
            if len(lives) > 1:
                return healthy
            await healthy.close()
            return ThreadLink(lambda channel: (channel.send(READY), channel.receive(None), 1 / 0))

        engine = AsyncEngine("m", start, SystemClock())
        await engine.start()
        assert len((await tokens_of(engine.submit(make_request(), [])))[0]) == 3
        assert engine.num_restarts == 1
        await engine.close()
        assert "ZeroDivisionError" in caplog.text


class TestHeldAdapters:
    async def hold(self, engine, script, error=None):
        task = asyncio.create_task(engine.hold(SOURCE))
        await until(lambda: HoldAdapter(1, "digest") in script.link.commands)
        script.link.say(AdapterHeld(1, error))
        await task

    async def test_held_and_released(self, engine, script):
        await engine.start()
        await self.hold(engine, script)
        assert engine.held == {"digest"}
        await engine.hold(SOURCE)
        engine.release("digest")
        engine.release("digest")
        assert script.link.commands == [
            RegisterAdapter(SOURCE),
            HoldAdapter(1, "digest"),
            ReleaseAdapter("digest"),
        ]
        assert engine.held == set()

    async def test_a_refusal_is_raised(self, engine, script):
        await engine.start()
        with pytest.raises(AdapterTooLargeError, match="3 of 4 pages"):
            await self.hold(engine, script, ErrorInfo("adapter_too_large", "3 of 4 pages"))
        assert engine.held == set()

    async def test_the_next_engine_holds_it_too(self, engine, script):
        await engine.start()
        await self.hold(engine, script)
        script.link.say(None)
        await until(lambda: engine.is_ready and engine.num_restarts == 1)
        assert script.link.commands == [RegisterAdapter(SOURCE), HoldAdapter(0, "digest")]

    async def test_an_engine_that_dies_meanwhile(self, engine, script):
        await engine.start()
        task = asyncio.create_task(engine.hold(SOURCE))
        await until(lambda: script.link.commands)
        script.link.say(None)
        with pytest.raises(NotReadyError, match="stopped"):
            await task
        assert engine.held == set()

    async def test_what_is_unloaded_is_held_no_longer(self, engine, script):
        await engine.start()
        await self.hold(engine, script)
        engine.forget_adapter("digest")
        assert engine.held == set()

    async def test_a_release_makes_room_for_what_was_rejected(self, engine, script, make_request):
        await engine.start()
        await self.hold(engine, script)
        other = fake_source("other", FAKE_CAPACITY.page_geometry)
        engine.preload(other)
        script.link.say(AdapterRejected("other", ErrorInfo("adapter_too_large", "17 pages")))
        # The preload behind it finds no such adapter: that is not the reason.
        script.link.say(AdapterRejected("other", ErrorInfo("adapter_not_found", "no such")))
        script.link.say(StepDone((), EngineStats(steps=7)))
        await until(lambda: engine.stats.steps == 7)
        with pytest.raises(AdapterTooLargeError, match="17 pages"):
            engine.submit(make_request(1, "other"), [other])
        engine.release("digest")
        engine.submit(make_request(1, "other"), [other])
        assert script.link.commands.count(RegisterAdapter(other)) == 2


class TestActivity:
    async def test_it_is_asked_between_two_steps(self, engine, script):
        await engine.start()
        task = asyncio.create_task(engine.recent_activity())
        await until(lambda: script.link.commands == [AskAdapters(1)])
        activity = AdapterActivity(running={"digest": 2})
        script.link.say(AdaptersTold(1, activity, EngineStats(steps=5)))
        assert await task == activity
        assert engine.stats.steps == 5
        # A long step: what was told last.
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
