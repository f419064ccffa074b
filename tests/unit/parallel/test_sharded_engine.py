"""Engines of several ranks on fake runners: what every rank computes, and what differs on one."""

import contextlib
import re
import threading
import time

import msgspec
import pytest

from loraplex.core.adapter import Residency
from loraplex.core.errors import ConfigError, DeviceLost
from loraplex.core.sampling_params import SamplingParams
from loraplex.parallel.executors import RankEnd
from loraplex.parallel.messages import for_other_ranks
from loraplex.parallel.sharded_loader import LOAD_SECONDS, ShardedLoader
from loraplex.parallel.start import start_sharded
from loraplex.parallel.world import World
from loraplex.testing.fake_clock import FakeClock
from support.eventually import eventually
from support.fake_engine import EngineParts, FakeEngine
from support.fake_loader import FakeLoader, fake_source
from support.fake_ranks import FakeRankProgram, FakeRankSettings, ThreadExecutor
from support.fake_runner import FAKE_CAPACITY, FakeRunner
from support.naming import naming

TWO = World(0, 2, 1)


class Sharded:
    """An engine whose ranks are threads."""

    def __init__(self, world=TWO, **settings):
        self.executor, self.lost = ThreadExecutor(), []
        body = msgspec.msgpack.encode(FakeRankSettings(**settings))
        self.runner, self.loader, self.ranks = start_sharded(
            world, body, self._program_of, self.executor, self.lost.append
        )

        self.parts = EngineParts(self.program.runner, self.runner, self.loader)

    def _program_of(self, start):
        self.program = FakeRankProgram(start)
        return self.program

    def engine(self, *, overlap=False):
        return FakeEngine(parts=self.parts, overlap=overlap)

    def plans(self, rank):
        """Return the plans of a rank, once none of those of rank 0 is missing."""
        plans = self.executor.programs[rank].runner.plans
        while len(plans) < len(self.program.runner.plans):
            time.sleep(0.0001)
        return plans


@pytest.fixture
def sharded():
    with contextlib.ExitStack() as stack:

        def make(*args, **kwargs):
            made = Sharded(*args, **kwargs)
            stack.callback(made.runner.close)
            return made

        yield make


WORLDS = [World(0, 2, 1), World(0, 1, 2), World(0, 2, 2), World(0, 4, 1)]


def run_until_idle(engine):
    """Loads of other ranks end in real time."""
    while not engine.engine.is_idle:
        engine.step()
        time.sleep(0.0001)


def outputs_of(engine):
    engine.register("a")
    engine.register("b", num_pages=2)
    engine.add((1, 2, 3), max_tokens=5)
    engine.add((4, 5), "a", max_tokens=4)
    engine.add((6,), "a", "b", max_tokens=3)
    run_until_idle(engine)
    return {request_id: done.token_ids for request_id, done in engine.completions.items()}


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_all_ranks_compute_the_same_plans(sharded, world, overlap):
    made = sharded(world, overlap=overlap)
    assert outputs_of(made.engine(overlap=overlap)) == outputs_of(FakeEngine(overlap=overlap))
    own = made.program.runner.plans
    assert own
    for rank in range(1, world.size):
        assert made.plans(rank) == own


def test_an_adapter_that_one_rank_cannot_read_fails_alone_and_everywhere(sharded):
    made = sharded(broken_digest="bad")
    engine = made.engine()
    engine.register("bad")
    engine.register("good")
    broken = engine.add((1,), "bad")
    others = [engine.add((2,)), engine.add((3,), "good")]
    run_until_idle(engine)
    error = engine.completions[broken].outputs[-1].error
    assert re.search(naming(1, "/staged/bad"), error.message)
    assert [engine.completions[other].error_code for other in others] == [None, None]
    residency = engine.engine.adapter_activity().residency
    assert residency == {"bad": Residency.FAILED, "good": Residency.DEVICE}
    assert made.program.loader.host == made.executor.programs[1].loader.host
    assert [source.digest for source in made.program.loader.host.values()] == ["good"]


def test_a_discarded_adapter_is_discarded_everywhere(sharded):
    made = sharded()
    engine = made.engine()
    engine.register("a")
    engine.add((1,), "a")
    run_until_idle(engine)
    engine.engine.forget_adapter("a")
    engine.step(3)
    made.runner.close()
    assert made.program.loader.host == {}
    assert made.executor.programs[1].loader.host == {}


@pytest.mark.parametrize("fault", ["token", "row"])
def test_a_rank_that_samples_otherwise_ends_the_engine(sharded, fault):
    engine = sharded(fault=fault, bad_step=3).engine()
    engine.add((1, 2, 3), max_tokens=8)
    with pytest.raises(DeviceLost, match=naming(1, 0)):
        run_until_idle(engine)
    tokens = engine.completions[1].token_ids.get(0, [])
    expected = run_alone(8)
    assert tokens == expected[: len(tokens)], "no token after the difference was used"


def run_alone(max_tokens):
    engine = FakeEngine()
    engine.add((1, 2, 3), max_tokens=max_tokens)
    run_until_idle(engine)
    return engine.completions[1].token_ids[0]


def test_a_failed_step_of_another_rank_ends_the_engine(sharded):
    made = sharded(fault="raise", bad_step=2)
    engine = made.engine()
    engine.add((1, 2, 3), max_tokens=8)
    with pytest.raises(DeviceLost, match="rank 1"):
        run_until_idle(engine)
    assert made.executor.programs[1].aborted.is_set(), "who waits for it wakes up"


def test_a_failed_step_of_rank_0_ends_the_engine_and_wakes_the_others(sharded):
    made = sharded(rank=0, fault="raise", bad_step=2)
    engine = made.engine()
    engine.add((1, 2, 3), max_tokens=8)
    with pytest.raises(DeviceLost, match=naming(2, 0)):
        run_until_idle(engine)
    assert made.program.aborted.is_set()


def test_a_slow_rank_gives_the_same_tokens(sharded):
    engine = sharded(fault="sleep", bad_step=2).engine()
    engine.add((1, 2, 3), max_tokens=4)
    run_until_idle(engine)
    assert engine.completions[1].token_ids[0] == run_alone(4)
    assert engine.engine.stats().rank_wait_ns == (1000, 1001)


def test_the_capacity_is_the_one_that_all_ranks_have(sharded):
    smaller = msgspec.structs.replace(FAKE_CAPACITY, num_adapter_pages=3)
    assert sharded(other_capacity=smaller).runner.capacity().num_adapter_pages == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"other_version": "2"}, (0, 1, 2)),
        ({"start_error": "no memory"}, (1,)),
        (
            {"other_capacity": msgspec.structs.replace(FAKE_CAPACITY, block_size=8)},
            ("block_size", 0, 16, 1, 8),
        ),
        ({"rank": 0, "start_error": "no memory"}, ("memory",)),
    ],
)
def test_ranks_that_do_not_fit_cannot_start(settings, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        Sharded(**settings)


def test_a_rank_that_ended_is_noticed_by_the_next_step(sharded):
    made = sharded()
    made.executor.ended(RankEnd(1, "was killed by SIGKILL", is_kill=True))
    assert [str(end) for end in made.lost] == ["rank 1 was killed by SIGKILL"]
    assert made.program.aborted.is_set()
    engine = made.engine()
    engine.add((1,))
    with pytest.raises(DeviceLost, match=naming(1, "SIGKILL")):
        run_until_idle(engine)


def test_ranks_reply_to_probes_until_one_is_stopped(sharded):
    made = sharded(World(0, 3, 1))
    silent = made.ranks.silent
    assert silent() == []
    made.ranks.probe()
    assert eventually(lambda: not silent())
    handle, turn = made.executor.programs[2].loader, threading.Event()
    poll, handle.poll = handle.poll, lambda: turn.wait() and poll()
    made.loader.start(1, fake_source("a", FAKE_CAPACITY.page_geometry))
    made.ranks.probe()
    made.ranks.probe()
    assert eventually(lambda: silent() == [2])
    turn.set()
    assert eventually(lambda: not silent())


def test_a_rank_whose_loads_make_no_progress_ends_the_engine(sharded):
    made, clock = sharded(), FakeClock(1)
    theirs, own = made.executor.programs[1].loader, made.program.loader
    loader = ShardedLoader(own, made.ranks, clock)
    for handle, num_polls in ((1, 1), (2, 10**9), (3, 10**9)):
        theirs.num_polls = num_polls
        loader.start(handle, fake_source(f"{handle}", FAKE_CAPACITY.page_geometry))
        assert eventually(lambda: handle in theirs._loading or handle in theirs.host)  # noqa: B023
    ended = []
    clock.advance_seconds(LOAD_SECONDS)
    while not ended:  # rank 1 ends the first load in real time
        ended += loader.poll()
    assert [load.handle for load in ended] == [1]
    clock.advance_seconds(LOAD_SECONDS)
    assert loader.poll() == []
    clock.advance_seconds(1)
    with pytest.raises(DeviceLost, match=naming(1, 300)):
        loader.poll()
    assert made.program.aborted.is_set()


@pytest.mark.parametrize("failing", ["runner", "server"])
def test_ranks_end_though_a_part_cannot_be_closed(sharded, monkeypatch, failing):
    made = sharded()
    owner = made.program.runner if failing == "runner" else made.runner._ranks._server
    close = owner.close

    def fail():
        close()
        raise OSError("planted")

    monkeypatch.setattr(owner, "close", fail)
    with pytest.raises(OSError, match="planted"):
        made.runner.close()
    assert made.executor.threads
    assert not any(thread.is_alive() for thread in made.executor.threads)


def test_other_ranks_return_no_logits():
    runner = FakeRunner()
    engine = FakeEngine(parts=EngineParts(runner, runner, FakeLoader()))
    engine.add((1, 2), sampling=SamplingParams(max_tokens=2, seed=1, return_logits=True))
    engine.add((1, 2), max_tokens=1)
    run_until_idle(engine)
    plans = [for_other_ranks(plan) for plan in runner.plans]
    assert not [row for plan in plans for row in plan.added if row.sampling.return_logits]
    assert [plan.rows for plan in plans] == [plan.rows for plan in runner.plans]
