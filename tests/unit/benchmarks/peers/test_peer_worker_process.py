"""Real processes and pipes; only the library in the worker is a fake."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from comparison.peers.in_process import RunningWorker
from comparison.peers.worker_process import WorkerProcess

from loraplex.core.errors import ConfigError
from support.naming import naming

FAKE = '''
"""Completes a prompt with the ids after its first; all that waits is one batch. 99 ends it."""
import os
def load(options):
    print("a library prints what it likes", flush=True)
    if options.get("fails"):
        raise RuntimeError("no such model")
    return Fake()
class Fake:
    gather_seconds = 0.05
    def __init__(self):
        self.jobs, self.adapters = [], {"a": 20, "b": 40}
    @property
    def is_idle(self):
        return not self.jobs
    def submit(self, job):
        if not job.prompt:
            raise ValueError("a prompt has at least one token")
        self.jobs.append(job)
    def add_adapter(self, name, path):
        self.adapters[name] = 60
    def remove_adapter(self, name):
        del self.adapters[name]
    def step(self):
        jobs, self.jobs = self.jobs, []
        if any(job.prompt[0] == 99 for job in jobs):
            print("out of memory", flush=True)
            os._exit(3)
        for step in range(max(job.num_tokens for job in jobs)):
            for job in jobs:
                job.add(self.adapters.get(job.adapter, 0) + job.prompt[0] + step)
'''


@pytest.fixture
def start(setup, tmp_path):
    (tmp_path / "fake_worker.py").write_text(FAKE)

    async def start(**options):
        return await WorkerProcess.start(
            Path(sys.executable),
            "fake_worker",
            options,
            log=setup.log,
            variables={"PYTHONPATH": str(tmp_path)},
            seconds=30,
        )

    return start


@pytest.fixture
async def running(start, setup):
    running = RunningWorker(await start(), setup)
    yield running
    await running.stop()


async def test_an_output_has_the_tokens_and_the_workers_own_times(running, exchange):
    sent = exchange(prompt=(10, 11), num_output_tokens=3)
    before = time.perf_counter_ns()
    await running.send(sent)
    after = time.perf_counter_ns()
    received = running.read(sent)
    assert received.text == "<10><11><12>"
    assert (received.num_prompt_tokens, received.num_output_tokens) == (2, 3)
    assert received.error is None
    assert [before, *received.chunk_ns, after] == sorted([before, *received.chunk_ns, after])
    assert len(received.chunk_ns) == 3


async def test_many_at_once_get_each_their_own_length_and_adapter(running, exchange):
    sent = [exchange(adapter, (10,), count) for adapter, count in ((None, 1), (0, 5), (1, 2))]
    await asyncio.gather(*(running.send(one) for one in sent))
    assert [running.read(one).text for one in sent] == [
        "<10>",
        "<30><31><32><33><34>",
        "<50><51>",
    ]


async def test_a_refusal_is_of_one_request_alone(running, exchange):
    bad, good = exchange(prompt=()), exchange()
    await asyncio.gather(running.send(bad), running.send(good))
    received = running.read(bad)
    assert received.error == "ValueError: a prompt has at least one token"
    assert received.num_prompt_tokens == 0
    assert running.read(good).error is None


async def test_adapters_come_and_go(running, exchange, new_adapter):
    index = await running.add_adapter(new_adapter("late"))
    sent = exchange(index, (1,), 1)
    await running.send(sent)
    assert running.read(sent).text == "<61>"
    await running.remove_adapter(index)
    with pytest.raises(ConfigError, match="remove_adapter: KeyError"):
        await running._checked("remove_adapter", name="late")


async def test_an_unknown_op_is_reported(running):
    with pytest.raises(ConfigError, match=naming("dance")):
        await running._checked("dance")


async def test_a_worker_that_dies_fails_what_waits_and_what_comes(running, exchange):
    first, later = exchange(prompt=(99,)), exchange()
    await running.send(first)
    await running.send(later)
    for sent in (first, later):
        error = running.read(sent).error
        assert error is not None
        assert "the worker ended" in error
        assert "out of memory" in error


async def test_a_worker_that_cannot_load_is_reported(start):
    with pytest.raises(ConfigError, match="no such model"):
        await start(fails=True)


async def test_stop_leaves_no_process_and_may_be_repeated(start):
    worker = await start()
    await worker.stop()
    await worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    with pytest.raises(ConfigError, match="the worker ended"):
        await worker.request("generate")
