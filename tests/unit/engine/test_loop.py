"""The loop over a real engine on fake parts, spoken to through a channel."""

import itertools
import queue
import threading
import time

import pytest

from loraplex.core.adapter import AdapterUse
from loraplex.core.clock import Clock, SystemClock
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import FinishReason
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine import loop as engine_loop
from loraplex.engine.channel import ThreadChannel
from loraplex.engine.engine import Engine, build_engine
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import (
    AbortRequest,
    AdapterPinned,
    AdapterRejected,
    AddRequest,
    AddRequests,
    EngineReady,
    PinAdapter,
    PreloadAdapter,
    QueryAdapters,
    RegisterAdapter,
    Shutdown,
    StepDone,
    UnpinAdapter,
)
from loraplex.engine.step_marker import StepMarker
from loraplex.testing.fake_clock import FakeClock
from support.eventually import eventually
from support.fake_loader import FakeLoader, fake_source
from support.fake_runner import FAKE_CAPACITY, FakeRunner

GEOMETRY = FAKE_CAPACITY.page_geometry
QUIET_SECONDS = 0.05


def request(request_id: int = 1, *digests: str, max_tokens: int = 3, **fields) -> EngineRequest:
    return EngineRequest(
        **{
            "request_id": request_id,
            "prompt_token_ids": (1, 2, 3),
            "task": Generate(SamplingParams(max_tokens=max_tokens, seed=0, temperature=0)),
            "eos_token_ids": (),
            "adapters": tuple(map(AdapterUse, digests)),
            "kv_salt": b"".join(digest.encode() for digest in digests),
            "tenant": "default",
            "priority": 0,
            "arrival_ns": time.monotonic_ns(),
            "deadline_ns": None,
        }
        | fields
    )


class CountingEngine(Engine):
    num_steps = 0
    num_checks = 0

    def step(self):
        self.num_steps += 1
        return super().step()

    def check(self):
        self.num_checks += 1
        super().check()


class RunningLoop:
    """A loop in its thread; events come in the order in which they were sent."""

    def __init__(
        self,
        settings: SchedulerSettings | None = None,
        *,
        num_polls: int = 1,
        clock: Clock | None = None,
        **kwargs,
    ):
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.channel = ThreadChannel(self.events.put)
        self.loader = FakeLoader(num_polls)
        self.runner = FakeRunner(loader=self.loader)
        clock = clock or SystemClock()
        self.engine = build_engine(
            self.runner, self.loader, clock, settings, adapter_host_bytes=1000
        )
        self.engine.__class__ = CountingEngine
        self.loop = EngineLoop(self.engine, self.channel, clock, **kwargs)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        assert self.event() == EngineReady(FAKE_CAPACITY)

    def put(self, *commands) -> None:
        for command in commands:
            self.channel.put(command)

    def event(self):
        return self.events.get(timeout=60)

    def outputs_until_finished(self, request_id: int) -> list:
        outputs = []
        while not (outputs and outputs[-1].finished):
            event = self.event()
            assert isinstance(event, StepDone)
            outputs += [o for o in event.outputs if o.request_id == request_id]
        return outputs

    def tokens(self, request_id: int) -> list[int]:
        outputs = self.outputs_until_finished(request_id)
        assert outputs[-1].error is None
        return [t for output in outputs for delta in output.deltas for t in delta.token_ids]

    def stop(self) -> None:
        self.put(Shutdown())
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.runner.violations == []


@pytest.fixture
def running():
    loop = RunningLoop(check_when_idle=True)
    yield loop
    loop.stop()


def test_requests_are_completed(running):
    first, second = request(1, max_tokens=5), request(2, prompt_token_ids=(9,))
    running.put(AddRequest(first))
    assert running.tokens(1) == running.runner.model.output(first, 0, 5)
    running.put(AddRequest(second))
    assert running.tokens(2) == running.runner.model.output(second, 0, 3)


def test_requests_of_one_command_are_in_one_step(running):
    running.put(AddRequests(tuple(request(number) for number in (1, 2, 3, 4))))
    assert running.event().record.request_ids == (1, 2, 3, 4)


def test_commands_that_wait_are_taken_before_the_next_step():
    loop = RunningLoop()
    loop.stop()
    for request_id in (1, 2, 3):
        loop.put(AddRequest(request(request_id)))
    loop.put(AbortRequest(2))
    thread = threading.Thread(target=loop.loop.run)
    thread.start()
    assert isinstance(loop.event(), EngineReady)
    step = loop.event()
    assert step.record.request_ids == (1, 3)
    loop.put(Shutdown())
    thread.join(60)


def test_every_step_has_a_record(running):
    running.put(AddRequest(request(1, max_tokens=1)))
    event = running.event()
    assert event.record.request_ids == (1,)
    assert event.record.num_tokens == 3
    assert event.stats.steps == 1
    assert event.stats.generation_tokens == 1
    assert event.stats.num_running == 0


@pytest.mark.parametrize(
    ("step_seconds", "has_statistics"),
    [(0, [True, False, False, True]), (engine_loop.STATS_SECONDS, [True, True, True, True])],
)
def test_statistics_are_sent_now_and_then_while_rows_only_decode(step_seconds, has_statistics):
    clock = FakeClock()
    loop = RunningLoop(clock=clock)
    launch = loop.runner.launch

    def slow_launch(plan):
        clock.advance_seconds(step_seconds)
        return launch(plan)

    loop.runner.launch = slow_launch
    loop.put(AddRequest(request(1, max_tokens=4)))
    events = [loop.event() for _ in has_statistics]
    assert [event.stats is not None for event in events] == has_statistics
    assert events[-1].stats.generation_tokens == 4
    loop.stop()


def test_a_refused_request_is_reported_without_a_step(running):
    running.put(AddRequest(request(1, prompt_token_ids=())))
    event = running.event()
    assert event.record is None
    assert event.outputs[0].error.code == "invalid_request"


def test_an_abort_ends_a_request(running):
    running.put(AddRequest(request(1, max_tokens=1000)))
    running.event()
    running.put(AbortRequest(1))
    last = running.outputs_until_finished(1)[-1]
    assert last.deltas[-1].finish_reason is FinishReason.ABORT
    assert last.error is None


def test_an_abort_of_no_request_changes_nothing(running):
    running.put(AbortRequest(99), AbortRequest(99, 3), AddRequest(request(1)))
    assert len(running.tokens(1)) == 3


def test_an_adapter_is_registered_and_loaded(running):
    requested = request(1, "a")
    running.put(RegisterAdapter(fake_source("a", GEOMETRY)), AddRequest(requested))
    assert running.tokens(1) == running.runner.model.output(requested, 0, 3)


@pytest.mark.parametrize("size", [{"num_pages": 17}, {"num_bytes": 1001}])
def test_an_adapter_that_is_too_large_is_rejected(running, size):
    running.put(RegisterAdapter(fake_source("a", GEOMETRY, **size)))
    event = running.event()
    assert isinstance(event, AdapterRejected)
    assert (event.digest, event.error.code) == ("a", "adapter_too_large")
    running.put(AddRequest(request(1, "a")))
    assert running.outputs_until_finished(1)[-1].error.code == "adapter_not_found"


def test_preloading_brings_an_adapter_to_the_device(running):
    running.put(RegisterAdapter(fake_source("a", GEOMETRY)), PreloadAdapter("a"))
    event = running.event()
    assert (event.record.num_rows, event.record.adapter_copies_started) == (0, 1)
    assert event.stats.adapters.num_on_device == 1
    running.put(AddRequest(request(1, "a", max_tokens=1)))
    assert running.event().stats.adapters.device_hits == 1


def test_preloading_what_is_not_registered_is_rejected(running):
    running.put(PreloadAdapter("b"))
    event = running.event()
    assert (event.digest, event.error.code) == ("b", "adapter_not_found")


def test_a_failed_load_fails_its_request(running):
    running.loader.fail("a")
    running.put(RegisterAdapter(fake_source("a", GEOMETRY)), AddRequest(request(1, "a")))
    error = running.outputs_until_finished(1)[-1].error
    assert isinstance(error, ErrorInfo)
    assert error.code == "adapter_load_failed"


def test_a_load_that_takes_its_time_is_awaited_without_spinning():
    loop = RunningLoop(num_polls=20)
    start = time.monotonic()
    loop.put(RegisterAdapter(fake_source("a", GEOMETRY)), AddRequest(request(1, "a")))
    assert len(loop.tokens(1)) == 3
    seconds = time.monotonic() - start
    # One turn per poll interval of a millisecond, and some for the tokens.
    assert 20 <= loop.engine.num_steps <= 1000 * seconds + 10
    loop.stop()


def test_an_idle_loop_sleeps(running):
    running.put(AddRequest(request(1)))
    running.tokens(1)
    time.sleep(QUIET_SECONDS)
    num_steps = running.engine.num_steps
    time.sleep(QUIET_SECONDS)
    assert running.engine.num_steps == num_steps
    assert num_steps < 10


def test_an_idle_loop_shows_that_it_is_alive(monkeypatch):
    monkeypatch.setattr(engine_loop, "BEAT_SECONDS", 0.01)
    loop = RunningLoop()
    num_steps = loop.engine.num_steps
    before = loop.channel.marker.progress()
    assert eventually(lambda: loop.channel.marker.progress().num_beats > before.num_beats + 2)
    assert loop.engine.num_steps == num_steps
    loop.stop()


def test_the_queue_delay_lets_requests_join():
    clock, start = FakeClock(), time.monotonic()
    loop = RunningLoop(SchedulerSettings(max_queue_delay_microseconds=500_000), clock=clock)
    for number in (1, 2):
        loop.put(AddRequest(request(number, arrival_ns=clock.now_ns())))
        assert eventually(lambda number=number: loop.engine.stats().num_waiting == number)
    assert loop.events.empty()
    clock.advance_seconds(0.5)
    loop.put(AbortRequest(9))  # wakes it
    assert loop.event().record.request_ids == (1, 2)
    num_waits = (time.monotonic() - start) / 0.5  # real waits of half a second
    assert loop.engine.num_steps <= 8 + num_waits, "it spins while it waits"
    loop.stop()


def test_a_deadline_wakes_the_loop():
    loop = RunningLoop(SchedulerSettings(max_queue_delay_microseconds=10**9))
    loop.put(AddRequest(request(1, deadline_ns=time.monotonic_ns() + 20_000_000)))
    assert loop.outputs_until_finished(1)[-1].error.code == "deadline_exceeded"
    loop.stop()


def test_an_idle_engine_is_checked(running):
    running.put(AddRequest(request(1, max_tokens=4)))
    running.tokens(1)
    running.stop()
    assert running.engine.num_checks == 1


def test_checks_are_off_by_default():
    loop = RunningLoop()
    loop.put(AddRequest(request(1)))
    loop.tokens(1)
    loop.stop()
    assert loop.engine.num_checks == 0


def test_shutdown_leaves_work_undone():
    loop = RunningLoop()
    loop.put(AddRequest(request(1, max_tokens=10**6)))
    loop.event()
    loop.stop()


def test_an_idle_engine_wakes_to_let_idle_adapters_leave():
    running = RunningLoop(SchedulerSettings(lora_ttl_seconds=1.0))
    source = fake_source("d", GEOMETRY)
    running.put(RegisterAdapter(source), AddRequest(request(1, "d")))
    running.tokens(1)
    deadline = time.monotonic() + 60
    while running.loader.host and time.monotonic() < deadline:
        time.sleep(0.005)
    assert running.loader.host == {}
    running.stop()


def test_held_adapters_and_refusals(running):
    running.put(RegisterAdapter(fake_source("d", GEOMETRY)), PinAdapter(7, "d"))
    running.put(
        PinAdapter(8, "never known"), QueryAdapters(9), UnpinAdapter("d"), QueryAdapters(10)
    )
    completions = []
    while len(completions) < 4:
        event = running.event()
        if not isinstance(event, StepDone):
            completions.append(event)
    held, refused, reported, released = completions
    assert held == AdapterPinned(7)
    assert (refused.query_id, refused.error.code) == (8, "adapter_not_found")
    assert (reported.query_id, reported.activity.pinned) == (9, ("d",))
    assert (released.query_id, released.activity.pinned) == (10, ())


class ProbedRanks:
    """Implements RankProbes. A rank that is stopped replies to no probe."""

    def __init__(self):
        self.stopped = []
        self.num_probes = 0

    def probe(self):
        self.num_probes += 1

    def silent(self):
        return self.stopped


class TurnsChannel:
    """A channel whose clock moves while the loop waits, and which then has the next command."""

    def __init__(self, clock, turns):
        """turns: what happens at each wait of the loop: a command, or a function."""
        self.marker = StepMarker()
        self.logits_dir = None
        self.clock = clock
        self.turns = list(turns)
        self.events = []
        self.beats = []
        """Number of beats at each wait."""

    def receive(self, timeout_seconds):
        if timeout_seconds == 0:
            return None
        assert timeout_seconds is not None
        self.clock.advance_seconds(timeout_seconds)
        self.beats.append(self.marker.progress().num_beats)
        turn = self.turns.pop(0) if self.turns else Shutdown()
        return turn() if callable(turn) else turn

    def send(self, event):
        self.events.append(event)


def turns_of(ranks, *turns):
    """Return the channel of a loop that has run through these turns."""
    clock, loader = FakeClock(10**9), FakeLoader(num_polls=10**9)
    runner = FakeRunner(loader=loader)
    engine = build_engine(runner, loader, clock, adapter_host_bytes=1000, ranks=ranks)
    channel = TurnsChannel(clock, turns)
    EngineLoop(engine, channel, clock).run()
    return channel


class TestRanks:
    def test_an_idle_engine_is_alive_only_with_all_its_ranks(self):
        ranks = ProbedRanks()
        stop, go_on = lambda: ranks.stopped.append(1), ranks.stopped.clear
        channel = turns_of(ranks, None, None, stop, None, None, None, go_on, None, None)
        deltas = [after - before for before, after in itertools.pairwise(channel.beats)]
        assert deltas == [1, 1, 0, 0, 0, 0, 1, 1, 1]
        assert ranks.num_probes == 1 + sum(deltas), "one probe at a time"

    def test_commands_show_nothing_of_a_stopped_rank(self):
        ranks = ProbedRanks()
        ranks.stopped.append(1)
        channel = turns_of(ranks, *(QueryAdapters(number) for number in range(20)))
        assert len(channel.events) == 21
        assert channel.beats[-1] == channel.beats[0]

    def test_a_load_shows_nothing_of_a_stopped_rank(self):
        """An engine that awaits a load polls it every millisecond."""
        ranks = ProbedRanks()
        register = RegisterAdapter(fake_source("a", GEOMETRY))
        preload = PreloadAdapter("a")
        stop = lambda: ranks.stopped.append(1)  # noqa: E731
        channel = turns_of(ranks, register, preload, *[None] * 2000, stop, *[None] * 3000)
        assert channel.beats[2002] > channel.beats[2] + 1000
        first_after = channel.beats[2003 + 1000]  # the probe before it had been replied to
        assert channel.beats[-1] == first_after
        assert ranks.num_probes <= 5, "loads do not wait a second each"

    def test_a_pin_is_confirmed_once_all_ranks_reply(self):
        ranks = ProbedRanks()
        seen = []
        look = lambda: seen.append([e for e in channel.events if isinstance(e, AdapterPinned)])  # noqa: E731
        ranks.stopped.append(1)
        register = RegisterAdapter(fake_source("a", GEOMETRY))
        clock, loader = FakeClock(10**9), FakeLoader()
        runner = FakeRunner(loader=loader)
        engine = build_engine(runner, loader, clock, adapter_host_bytes=1000, ranks=ranks)
        turns = (register, PinAdapter(3, "a"), look, look, ranks.stopped.clear, look)
        channel = TurnsChannel(clock, turns)
        EngineLoop(engine, channel, clock).run()
        assert seen == [[], [], [AdapterPinned(3)]]
