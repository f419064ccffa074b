"""A request that is aborted, or whose time is up, at every stage: all it held is back at once."""

import pytest

from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from support.capacities import changed_capacity
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY

TIMEOUT_NS = 10**12
"""Far beyond what a test's steps take, so that a test alone decides when it is up."""
ONE_SLOT = changed_capacity(FAKE_CAPACITY, max_num_seqs=1)
FEW_BLOCKS = changed_capacity(FAKE_CAPACITY, num_blocks=6)
CHUNKS = SchedulerSettings(max_num_batched_tokens=16, max_prefill_chunk=8)


def queued(overlap):
    fakes = FakeEngine(ONE_SLOT, overlap=overlap)
    fakes.add(max_tokens=500)
    fakes.step()
    request_id = fakes.add(max_tokens=99, timeout_ns=TIMEOUT_NS)
    fakes.step()
    assert fakes.engine.stats().num_waiting == 1
    return fakes, request_id, 1


def loading(overlap):
    fakes = FakeEngine(num_polls=10**6, overlap=overlap)
    fakes.register("a")
    request_id = fakes.add([1], "a", max_tokens=99, timeout_ns=TIMEOUT_NS)
    fakes.step(3)
    assert fakes.engine.adapter_activity().residency == {"a": "loading"}
    return fakes, request_id, 0


def copying(overlap):
    fakes = FakeEngine(copy_steps=10**6, overlap=overlap)
    fakes.register("a")
    fakes.add(max_tokens=500)
    request_id = fakes.add([1], "a", max_tokens=99, timeout_ns=TIMEOUT_NS)
    fakes.step(4)
    assert fakes.engine.adapter_activity().residency == {"a": "copying"}
    return fakes, request_id, 1


def prefill(overlap):
    fakes = FakeEngine(settings=CHUNKS, overlap=overlap)
    request_id = fakes.add(range(1, 90), max_tokens=99, timeout_ns=TIMEOUT_NS)
    fakes.step(2)
    assert fakes.engine.stats().blocks_held
    assert fakes.completions[request_id].outputs == []
    return fakes, request_id, 0


def decode(overlap):
    fakes = FakeEngine(overlap=overlap)
    fakes.register("a")
    sampling = SamplingParams(max_tokens=99, n=3, seed=1)
    request_id = fakes.add(
        range(1, 20), "a", sampling=sampling, eos_token_ids=(), timeout_ns=TIMEOUT_NS
    )
    fakes.step(8)
    assert {*fakes.completions[request_id].token_ids} == {0, 1, 2}
    return fakes, request_id, 0


def held_back(overlap):
    """Two of its sequences wait for the first one to compute their prompt."""
    fakes = FakeEngine(settings=CHUNKS, overlap=overlap)
    sampling = SamplingParams(max_tokens=99, n=3, seed=1)
    request_id = fakes.add(range(1, 90), sampling=sampling, timeout_ns=TIMEOUT_NS)
    fakes.step(2)
    assert (fakes.engine.stats().num_running, fakes.engine.stats().num_waiting) == (1, 2)
    return fakes, request_id, 0


def preempted(overlap):
    fakes = FakeEngine(FEW_BLOCKS, overlap=overlap)
    fakes.add(range(1, 33), max_tokens=60, eos_token_ids=(), priority=-1)
    request_id = fakes.add(range(40, 72), max_tokens=60, eos_token_ids=(), timeout_ns=TIMEOUT_NS)
    while not fakes.engine.stats().preemptions:
        fakes.step()
    assert fakes.engine.stats().num_waiting == 1
    assert fakes.completions[request_id].outputs
    return fakes, request_id, 1


STAGES = [queued, loading, copying, prefill, decode, held_back, preempted]


def abort(fakes, request_id):
    fakes.engine.abort(request_id)


def abort_each_sequence(fakes, request_id):
    for index in range(fakes.requests[request_id].sampling.n):
        fakes.engine.abort(request_id, index)


def run_out_of_time(fakes, request_id):
    fakes.clock.advance(TIMEOUT_NS)


ENDS = {abort: None, abort_each_sequence: None, run_out_of_time: "deadline_exceeded"}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stage", STAGES)
def test_everything_is_back_within_one_step(stage, end, overlap):
    fakes, request_id, num_others = stage(overlap)
    end(fakes, request_id)
    fakes.step()
    completion = fakes.completions[request_id]
    assert completion.is_finished
    assert completion.error_code == ENDS[end]
    if ENDS[end] is None:
        num_sequences = fakes.requests[request_id].sampling.n
        assert completion.finish_reasons == dict.fromkeys(range(num_sequences), "abort")
    stats, activity = fakes.engine.stats(), fakes.engine.adapter_activity()
    assert stats.num_running + stats.num_waiting == num_others
    assert (activity.running, activity.waiting) == ({}, {})
    if not num_others:
        assert stats.blocks_held == 0
    fakes.engine.check()
    fakes.loader.num_polls = fakes.runner.copy_steps = 0
    num_outputs = len(completion.outputs)
    fakes.engine.forget_adapter("a")
    later = fakes.add([7], max_tokens=2)
    fakes.step(4)
    assert len(completion.outputs) == num_outputs, "an output after the last one"
    if stage is not queued:
        assert fakes.tokens(later) == fakes.alone(later), "there are free blocks at once"
