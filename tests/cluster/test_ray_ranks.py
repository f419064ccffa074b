"""Ranks as actors on a Ray cluster of two nodes on this machine."""

import contextlib
import threading

import msgspec
import pytest
from ray.util import placement_group_table

from loraplex import LLM, SamplingParams
from loraplex.core.errors import ConfigError, DeviceLost
from loraplex.demo import BASE_PATH
from loraplex.parallel.ray_executor import RayExecutor
from loraplex.parallel.start import start_sharded
from loraplex.parallel.world import World
from support.fake_engine import EngineParts, FakeEngine
from support.fake_ranks import FakeRankProgram, FakeRankSettings

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("cluster"),
]
NODE_CPUS = 2
"""A stage of two ranks fills a node."""
NO_SECONDS = 0.5


class RayRanks:
    def __init__(self, world, **settings):
        self.lost, self.has_lost = [], threading.Event()
        body = msgspec.msgpack.encode(FakeRankSettings(**settings))
        self.executor = RayExecutor(FakeRankProgram)
        runner, loader, _ = start_sharded(world, body, self._program_of, self.executor, self._lose)
        self.engine = FakeEngine(parts=EngineParts(self.program.runner, runner, loader))
        self.runner = runner

    def _program_of(self, start):
        self.program = FakeRankProgram(start)
        return self.program

    def _lose(self, end):
        self.lost.append(end)
        self.has_lost.set()

    def tokens(self, max_tokens=5):
        request_id = self.engine.add((1, 2, 3), max_tokens=max_tokens)
        while not self.engine.engine.is_idle:
            self.engine.step()
        return self.engine.tokens(request_id)


@contextlib.contextmanager
def ranks(*args, **settings):
    made = RayRanks(*args, **settings)
    with contextlib.closing(made.runner):
        yield made


def groups_left():
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_stages_on_two_nodes():
    with ranks(World(0, 2, 2)) as made:
        assert made.tokens() == made.engine.alone(1)
        assert made.runner.capacity() == made.program.runner.capacity()
    assert made.lost == []
    assert groups_left() == []


def test_a_killed_actor_is_a_kill():
    with ranks(World(0, 2, 1), fault="kill", bad_step=3) as made:
        with pytest.raises(DeviceLost, match="rank 1"):
            made.tokens(20)
        assert made.has_lost.wait(60)
        assert made.lost[0].is_kill
    assert groups_left() == []


def test_an_actor_that_fails_is_a_crash():
    with (
        ranks(World(0, 2, 1), fault="raise", bad_step=3) as made,
        pytest.raises(DeviceLost, match="rank 1"),
    ):
        made.tokens(20)
    assert not any(end.is_kill for end in made.lost)


def test_an_actor_that_cannot_start():
    with pytest.raises(ConfigError, match="rank 1: no memory"):
        RayRanks(World(0, 2, 1), start_error="no memory")
    assert groups_left() == []


def test_a_cluster_that_is_too_small_is_named():
    executor = RayExecutor(FakeRankProgram, cpus=3, place_seconds=NO_SECONDS)
    body = msgspec.msgpack.encode(FakeRankSettings())
    with pytest.raises(ConfigError, match=r"no node with \[{'CPU': 3, 'node:.*available in total"):
        start_sharded(World(0, 2, 1), body, FakeRankProgram, executor)
    assert groups_left() == []


def test_the_whole_engine():
    prompts, params = ["The capital of France"], SamplingParams(max_tokens=12, temperature=0)
    outputs = []
    for settings in ({}, {"tensor_parallel_size": 2, "executor": "ray"}):
        with LLM(str(BASE_PATH), kv_cache_bytes=1 << 22, **settings) as llm:
            outputs.append(llm.generate(prompts, params))
    alone, sharded = outputs
    assert [output.text for output in sharded] == [output.text for output in alone]
