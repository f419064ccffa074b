"""A journal made under load replays to the same plans; what is changed in it is found."""

import json
import logging
import random
import re

import msgspec
import pytest

from loraplex.app.engine import build_engine as app_engine
from loraplex.core.adapter import AdapterUse
from loraplex.core.beam_search import BeamSearch
from loraplex.core.config import ModelConfig
from loraplex.core.plan import Capacity
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, FairShare, SchedulerSettings
from loraplex.demo import BASE_PATH
from loraplex.engine.journal import PlanMade
from loraplex.engine.journal_file import JournalFile, JournalReader
from loraplex.engine.replay import ReplayRefusedError, replay
from loraplex.scheduling.scheduler import Scheduler
from loraplex.testing.fake_clock import FakeClock
from support import fake_engine
from support.capacities import changed_capacity
from support.engine_requests import engine_request
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming

SMALL: Capacity = changed_capacity(
    FAKE_CAPACITY,
    num_blocks=10,
    block_size=4,
    num_adapter_pages=4,
    max_num_seqs=5,
    num_host_blocks=8,
    vocab_size=5,
)
ADAPTERS = {"a": 1, "b": 1, "c": 2, "d": 1, "e": 2}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "steps.jsonl"


@pytest.fixture(autouse=True)
def no_tracebacks(caplog):
    """Steps fail on purpose."""
    caplog.set_level(logging.CRITICAL, logger="loraplex.engine.engine")


def run_at_random(path, seed):
    """A FakeEngine after random arrivals, aborts, failures and pauses; its journal is at path."""
    draws = random.Random(seed)
    settings = SchedulerSettings(
        batch_scheduler_policy=list(BatchSchedulerPolicy)[seed // 2 % 2],
        fair_share=draws.choice(list(FairShare)),
        max_num_batched_tokens=draws.choice([8, 16, 64]),
        max_prefill_chunk=draws.choice([None, 3]),
        max_queue_size=draws.choice([0, 6]),
        max_queue_delay_microseconds=draws.choice([0, 3000]),
        num_draft_tokens=draws.choice([0, 3]),
        adapter_aging_seconds=0.01,
        lora_ttl_seconds=draws.choice([None, 1.0]),
    )
    fakes = FakeEngine(
        msgspec.structs.replace(SMALL, num_stages=(1, 3, 2)[seed % 3]),
        settings,
        journal=JournalFile(path, 1 << 30),
        adapter_host_bytes=draws.choice([300, 1000]),
        num_polls=draws.choice([1, 3]),
        copy_steps=draws.choice([0, 2]),
        eviction_policy=("lru", "lfu", "cost")[seed % 3],
        overlap=seed % 2 == 1,
    )
    for digest, num_pages in ADAPTERS.items():
        fakes.register(digest, num_pages=num_pages)
    for _ in range(60):
        happen(fakes, draws)
    fakes.run()
    fakes.engine.close()
    return fakes


def happen(fakes, draws):
    for _ in range(draws.choice([0, 0, 1, 3])):
        max_tokens = draws.randint(1, 19)
        kinds = [{"n": 1}, {"n": 1}, {"n": 2}, {"beam": BeamSearch(width=2)}]
        fakes.add(
            [draws.randint(1, 3) for _ in range(draws.randint(1, 20))],
            *draws.choice([(), ("a",), ("b",), ("c",), ("d",), ("e",), ("a", "b"), ("nobody's",)]),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                logprobs=draws.choice([None, 2]),
                prompt_logprobs=draws.choice([None, None, 0]),
                **draws.choice(kinds),
            ),
            priority=draws.choice([0, 0, 1]),
            timeout_ns=draws.choice([None, None, None, 30 * MILLISECOND_NS]),
        )
    choice = draws.random()
    if choice < 0.1:
        fakes.engine.abort(draws.randint(1, len(fakes.requests) + 1), draws.choice([None, 0]))
    elif choice < 0.2:
        fakes.runner.fail_step(early=draws.random() < 0.5)
    elif choice < 0.3:
        fakes.runner.fail_rows()
    elif choice < 0.4:
        fakes.loader.fail(draws.choice("abcde"))
    elif choice < 0.5:
        fakes.engine.preload(draws.choice("abcde"))
    elif choice < 0.55:
        fakes.engine.forget_adapter("d")
        fakes.register("d")
    elif choice < 0.6:
        fakes.runner.fail_copies()
    fakes.clock.advance(draws.choice([0, 0, MILLISECOND_NS, 500 * MILLISECOND_NS]))
    fakes.step(draws.randint(0, 6))


def replayed(path):
    reader = JournalReader(path)
    return replay(reader.header, reader)


def change_line(path, is_wanted, change):
    """Change the middle one of the lines that are wanted; its number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = [index for index, line in enumerate(lines) if is_wanted(line)]
    index = wanted[len(wanted) // 2]
    change(lines[index])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return index + 1


class RestlessClock(FakeClock):
    """Clock that advances at every reading."""

    def now_ns(self):
        self.advance(MILLISECOND_NS // 7)
        return super().now_ns()


@pytest.mark.parametrize("seed", range(24))
def test_random_load_replays(path, seed, monkeypatch):
    monkeypatch.setattr(fake_engine, "FakeClock", RestlessClock)
    fakes = run_at_random(path, seed)
    summary = replayed(path)
    assert summary.difference is None
    stats = fakes.engine.stats()
    assert summary.steps == stats.steps >= len(fakes.runner.plans) > 30
    assert summary.requests == len(fakes.requests)
    assert summary.preemptions == stats.preemptions
    assert summary.adapter_loads >= stats.adapters.loads > 0
    assert not summary.is_cut


def test_the_load_is_one(tmp_path):
    """What these schedules are to replay happens in them."""
    paths = [tmp_path / str(seed) for seed in range(8)]
    fakes = [run_at_random(path, seed) for seed, path in enumerate(paths)]
    summaries = [replayed(path) for path in paths]
    stats = [fake.engine.stats() for fake in fakes]
    assert sum(summary.preemptions for summary in summaries) > 5
    assert sum(summary.aborts for summary in summaries) > 20
    assert sum(summary.failed_steps for summary in summaries) > 20
    assert sum(each.cached_tokens for each in stats) > 100
    assert sum(each.adapters.device_evictions for each in stats) > 20
    assert sum(each.accepted_tokens for each in stats) > 0


def test_a_changed_plan_is_found(path):
    run_at_random(path, 1)

    def change(line):
        line["plan"]["rows"][0]["start"] += 1

    number = change_line(path, lambda line: line.get("plan", {}).get("rows"), change)
    difference = replayed(path).difference
    assert difference.line.number == number
    logged = difference.line.entry.plan
    assert re.search(naming(logged.step_id), difference.problem)
    assert difference.planned.rows[0].start + 1 == logged.rows[0].start


def test_a_changed_result_is_found(path):
    """Rows without their tokens fail, and so the next plans differ."""
    run_at_random(path, 2)

    def change(line):
        for row in line["result"]["rows"]:
            row["token_ids"] = []

    def samples(line):
        return any(row.get("token_ids") for row in line.get("result", {}).get("rows", []))

    number = change_line(path, samples, change)
    assert number < replayed(path).difference.line.number


def test_a_changed_clock_is_found(path):
    """An adapter that failed is tried again after a pause: the plan depends on the time."""
    fakes = FakeEngine(journal=JournalFile(path, 1 << 30))
    fakes.register("a")
    fakes.loader.fail("a")
    fakes.add([1], "a")
    fakes.step(3)
    fakes.clock.advance_seconds(2)
    fakes.add([1], "a")
    fakes.run()
    assert replayed(path).difference is None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["now_ns"] = 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replayed(path).difference is not None


def test_a_missing_command_is_found(path):
    run_at_random(path, 3)
    lines = path.read_text().splitlines(keepends=True)
    del lines[next(index for index, line in enumerate(lines) if '"type":"add"' in line)]
    path.write_text("".join(lines))
    assert replayed(path).difference is not None


@pytest.mark.parametrize("seed", [4, 5])
def test_a_killed_engine_leaves_a_journal_that_replays(path, seed):
    run_at_random(path, seed)
    whole = path.read_bytes()
    for size in random.Random(0).sample(range(len(whole) // 2, len(whole)), 12):
        path.write_bytes(whole[:size])
        reader = JournalReader(path)
        assert replay(reader.header, reader).difference is None
        assert reader.is_torn == (whole[size - 1 : size] != b"\n")


def test_a_step_without_its_end(path):
    """The plan of the step that killed the engine is there."""
    fakes = FakeEngine(journal=JournalFile(path, 1 << 30))
    fakes.add([1], max_tokens=3)
    fakes.step(2)
    lines = path.read_bytes().splitlines(keepends=True)
    assert b'"result"' in lines[-1]
    path.write_bytes(b"".join(lines[:-1]))
    summary = replayed(path)
    assert (summary.steps, summary.is_cut, summary.difference) == (1, True, None)


def test_a_scheduler_that_fails_does_so_again(path, monkeypatch):
    fakes = FakeEngine(journal=JournalFile(path, 1 << 30))
    fakes.add([1], max_tokens=5)
    fakes.step(2)

    def fail(_self):
        raise AssertionError("a block is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "plan", fail)
        with pytest.raises(AssertionError):
            fakes.step()
    assert [line.entry for line in JournalReader(path)][-1] == PlanMade(fakes.clock.now_ns())
    assert replayed(path).difference.problem == "no step was launched", "by a mended scheduler"
    plans = iter([Scheduler.plan, Scheduler.plan, fail])
    monkeypatch.setattr(Scheduler, "plan", lambda scheduler: next(plans)(scheduler))
    difference = replayed(path).difference
    assert re.search(naming("AssertionError"), difference.problem)
    assert difference.line.entry == PlanMade(fakes.clock.now_ns())


def test_what_cannot_be_built_is_refused(path):
    run_at_random(path, 0)
    reader = JournalReader(path)
    header = msgspec.structs.replace(reader.header, eviction_policy="mine")
    with pytest.raises(ReplayRefusedError, match="mine"):
        replay(header, reader)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_real_model(path, overlap):
    model = ModelConfig(
        path=str(BASE_PATH),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_bytes=1 << 20,
        iteration_log=str(path),
        overlap=overlap,
    )
    engine = app_engine(model)
    for request_id in range(6):
        engine.add(
            engine_request(
                tuple(range(5, 20 + request_id)),
                SamplingParams(max_tokens=6, temperature=1.0, seed=request_id, logprobs=2),
                request_id=request_id,
                adapters=() if request_id else (AdapterUse("nobody's"),),
                arrival_ns=request_id,
            )
        )
    while not engine.is_idle:
        engine.step()
    steps = engine.stats().steps
    engine.close()
    summary = replayed(path)
    assert (summary.steps, summary.requests, summary.difference) == (steps, 6, None)
