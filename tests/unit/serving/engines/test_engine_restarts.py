"""Requests across the lives of an engine, and which of them are suspected, by script."""

import asyncio
import re

import msgspec

from loraplex.core.beam_search import BeamSearch
from loraplex.core.errors import (
    ConfigError,
    ErrorInfo,
)
from loraplex.core.output import (
    EngineOutput,
    FinishReason,
    LogitsFile,
    PromptLogprobs,
    RequestTiming,
    SequenceDelta,
)
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import EngineStats
from loraplex.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    RegisterAdapter,
    StepDone,
    UnregisterAdapter,
)
from loraplex.serving.engines import async_engine, request_dispatch
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.engine_state import EngineState
from loraplex.serving.engines.in_flight_request import (
    MAX_BLAME,
    MAX_DEATHS,
    PLACE_OUTPUTS,
    SUSPECT_BLAME,
)
from loraplex.serving.engines.restart_limits import RestartLimits
from loraplex.serving.logits_files import files_of, read_and_delete
from loraplex.testing.fake_clock import FakeClock
from support.fake_loader import fake_source
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming
from support.scripted_engine import (
    ScriptedLink,
    died,
    done,
    ended,
    error_of,
    says,
    step_of,
    until,
)

MARK = StepDone((), EngineStats(steps=77))
SOURCE = fake_source("digest", FAKE_CAPACITY.page_geometry)


class TestRestart:
    async def test_a_request_goes_on_in_the_next_engine(self, engine, script, make_request):
        await engine.start()
        script.link.say(StepDone((), EngineStats(num_running=2)))
        request = make_request(1, "digest", n=2, requires_resident=True)
        stream = engine.submit(request, [SOURCE])
        script.gate.clear()
        timing = RequestTiming(request.arrival_ns, first_token_ns=7, num_preemptions=1)
        script.link.say(
            says(
                1, (0, 11, 12), (1, 21), timing=timing, prompt_logprobs=PromptLogprobs.of((None,))
            ),
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
            prompt_scores_delivered=True,
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
        stream = engine.submit(make_request(3), [])
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
        assert (await stream.take())[-1].finished
        script.gate.set()
        await until(lambda: engine.is_ready)
        (add,) = script.link.commands
        assert (add.request.request_id, add.request.ended) == (2, (1,))
        engine.abort(2)
        assert script.link.commands[1:] == [AbortRequest(2)]

    async def test_an_adapter_that_was_unloaded_meanwhile(self, engine, script, make_request):
        """The waiting request needs it in the next engine, too; no other request gets it there."""
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

    async def test_logits_that_were_delivered_outlive_their_engine(
        self, engine, script, make_request, temporary_folder, tmp_path
    ):
        """The client reads them when it can."""
        await engine.start()
        stream = engine.submit(make_request(1), [])
        path = tmp_path / "1-0"
        path.write_bytes(b"abcd")
        delta = SequenceDelta(0, (5,), logits=(LogitsFile(str(path), 1),))
        last = SequenceDelta(0, (6,), finish_reason=FinishReason.LENGTH)
        script.link.say(
            StepDone((EngineOutput(1, (delta,)),), EngineStats()),
            StepDone((EngineOutput(1, (last,), finished=True),), EngineStats()),
            died(),
        )
        await until(lambda: engine.num_restarts == 1 and engine.is_ready)
        path.unlink(missing_ok=True)  # as the link does with its folder
        outputs = await ended(stream)
        assert [logits.data for logits in read_and_delete(files_of(outputs)).values()] == [b"abcd"]
        await engine.close()
        assert list(temporary_folder.iterdir()) == []

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
        assert re.search(naming("1 new tokens"), error.message)
        script.gate.set()
        await until(lambda: engine.is_ready)
        script.link.say(done(2, 5))
        assert (await patient.take())[-1].error is None

    async def test_a_deadline_holds_for_an_engine_that_never_responds(
        self, engine, script, make_request
    ):
        await engine.start()
        now_ns = engine._clock.now_ns()
        late = engine.submit(make_request(1, arrival_ns=now_ns, deadline_ns=now_ns + 10**9), [])
        patient = engine.submit(make_request(2), [])
        script.link.say(says(1, (0, 5, 6)))
        assert (await late.take())[-1].deltas
        engine._clock.advance_seconds(1.1)  # the engine may still report it
        await asyncio.sleep(2 * request_dispatch._POLL_SECONDS)
        assert engine.num_requests == 2
        engine._clock.advance_seconds(0.1)
        error = await error_of(late)
        assert error.code == "deadline_exceeded"
        assert re.search(naming("1 seconds", "2 new tokens"), error.message)
        assert script.link.commands[-1] == AbortRequest(1)
        script.link.say(says(1, (0, 7), finished=True), done(2, 5))  # the first is ignored
        assert (await patient.take())[-1].error is None

    async def test_an_engine_that_does_not_come_back(self, script, make_request):
        """A request since the crash fails at once, an accepted one only after the patience."""
        engine = AsyncEngine("m", script, FakeClock(), patience=RestartLimits(30, 10))
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

    async def test_pauses_grow_until_an_engine_was_of_use(self, script, monkeypatch):
        pauses: list[float] = []
        sleep = asyncio.sleep

        async def record(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        clock = FakeClock()
        monkeypatch.setattr(ScriptedLink, "progress", lambda link: None)  # it sleeps, too
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
    """A request that crashes its engine, among other requests."""

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
        # The one that merely ran in the same batch is at another place now: one more suspect.
        assert self.requests_of(script) == [1]
        script.link.say(*[says(1, (0, 12))] * PLACE_OUTPUTS)
        await until(lambda: self.requests_of(script) == [1, 3])
        script.link.say(done(3, 31))
        await until(lambda: self.requests_of(script) == [1, 3, 4, 5])
        assert (await streams[3].take())[-1].error is None

    async def test_a_suspect_that_leaves_frees_its_place(self, engine, script, make_request):
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

    async def test_what_was_computed_and_not_reported_does_not_count(
        self, engine, script, make_request
    ):
        """An engine that crashes may be three tokens ahead of its reports."""
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
        for _ in range(MAX_DEATHS - 1):
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
        for _ in range(MAX_BLAME - SUSPECT_BLAME - 1):
            await self.restart(engine, script)
            assert self.requests_of(script) == [2]
        await self.restart(engine, script)
        assert (await error_of(poison)).code == "request_crashed_engine"
        assert self.requests_of(script) == [1]
