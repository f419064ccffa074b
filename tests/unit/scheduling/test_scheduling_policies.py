"""Static batches, no eviction, offload to the host, limits: seen through an engine on fakes."""

import random

import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.cache import Blocks
from loraplex.core.errors import ConfigError
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import (
    Batching,
    BatchSchedulerPolicy,
    FairShare,
    SchedulerSettings,
)
from support.capacities import changed_capacity
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.fake_runner import FAKE_CAPACITY


def fake_engine(settings=None, *, num_polls=1, overlap=False, **capacity):
    capacity = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, **capacity}
    fakes = FakeEngine(
        changed_capacity(FAKE_CAPACITY, **capacity),
        SchedulerSettings(**(settings or {})),
        num_polls=num_polls,
        overlap=overlap,
    )
    for digest in ("a", "b", "c"):
        fakes.register(digest)
    fakes.register("wide", num_pages=2)
    return fakes


def steps_of(fakes, request_id):
    """Indices of the launched steps that computed something for a request."""
    return [i for i, record in enumerate(fakes.records) if request_id in record.request_ids]


def check_outputs(fakes):
    for request_id, request in fakes.requests.items():
        completion = fakes.completions[request_id]
        expected = {i: fakes.alone(request_id, i) for i in range(request.sampling.n)}
        assert completion.token_ids == expected, request_id


STATIC = {"batching": Batching.STATIC}


def test_a_static_batch_runs_to_its_end():
    fakes = fake_engine(STATIC, max_num_seqs=3)
    first = [fakes.add(max_tokens=n) for n in (2, 5, 9)]
    fakes.step()
    second = [fakes.add(max_tokens=n) for n in (3, 1)]
    fakes.run()
    assert [steps_of(fakes, request_id)[0] for request_id in first] == [0, 0, 0]
    last = max(steps_of(fakes, request_id)[-1] for request_id in first)
    assert [steps_of(fakes, request_id)[0] for request_id in second] == [last + 1] * 2
    check_outputs(fakes)


def test_a_static_batch_is_formed_at_once_however_long_its_prompts_are():
    fakes = fake_engine({**STATIC, "max_num_batched_tokens": 8}, max_num_seqs=4)
    batch = [fakes.add(range(start, start + 20), max_tokens=12) for start in (1, 30, 60)]
    fakes.step()
    late = fakes.add(max_tokens=1)
    fakes.run()
    assert fakes.records[0].num_running == 3
    last = max(steps_of(fakes, request_id)[-1] for request_id in batch)
    assert steps_of(fakes, late) == [last + 1]
    check_outputs(fakes)


def test_a_static_batch_waits_for_its_adapters():
    fakes = fake_engine(STATIC, num_polls=4)
    fakes.add(max_tokens=3)
    fakes.add([1], "a", max_tokens=3)
    fakes.run()
    assert fakes.records[-1].request_ids == (1, 2)
    first = next(record for record in fakes.records if record.num_rows)
    assert first.request_ids == (1, 2)
    check_outputs(fakes)


def test_a_static_batch_does_not_wait_for_later_requests():
    fakes = fake_engine(STATIC, num_polls=4)
    early = fakes.add([1], "a", max_tokens=3)
    for index in range(8):
        fakes.step()
        fakes.add([1], "bc"[index % 2], max_tokens=1)
    assert steps_of(fakes, early)
    fakes.run()
    check_outputs(fakes)


def test_a_request_without_pages_waits_for_a_later_static_batch():
    fakes = fake_engine(STATIC, num_adapter_pages=2)
    narrow = [fakes.add([1], "a", max_tokens=4), fakes.add([1], "b", max_tokens=6)]
    wide = fakes.add([1], "wide", max_tokens=4)
    base = fakes.add([1], max_tokens=2)
    fakes.run()
    last = max(steps_of(fakes, request_id)[-1] for request_id in narrow)
    assert steps_of(fakes, base)[0] == steps_of(fakes, narrow[0])[0]
    assert steps_of(fakes, wide)[0] > last
    check_outputs(fakes)


def test_a_failed_load_does_not_stop_a_static_batch():
    fakes = fake_engine(STATIC, num_polls=3)
    fakes.loader.fail("a")
    failed, other = fakes.add([1], "a"), fakes.add([1], "b")
    fakes.run()
    assert fakes.completions[failed].error_code == "adapter_load_failed"
    assert fakes.tokens(other) == fakes.alone(other)


def test_preempted_and_held_back_sequences_come_back_to_their_static_batch():
    fakes = fake_engine(STATIC, num_blocks=9, max_num_seqs=4)
    sampling = SamplingParams(max_tokens=14, n=2, seed=1)
    batch = [fakes.add(range(1, 10), sampling=sampling), fakes.add(range(20, 24), max_tokens=14)]
    fakes.step(2)
    urgent = fakes.add([1], max_tokens=1, priority=-1)
    fakes.run()
    assert fakes.engine.stats().preemptions > 0
    last = max(steps_of(fakes, request_id)[-1] for request_id in batch)
    assert steps_of(fakes, urgent)[0] > last
    check_outputs(fakes)


def test_a_static_batch_waits_for_company():
    fakes = fake_engine({**STATIC, "max_queue_delay_microseconds": 5000})
    fakes.add()
    fakes.step(2)
    fakes.add()
    fakes.step(2)
    assert fakes.records == []
    fakes.run()
    assert fakes.records[0].num_rows == 2


def test_free_slots_of_a_running_static_batch_do_not_extend_the_queue():
    fakes = fake_engine({**STATIC, "max_queue_size": 1}, max_num_seqs=4)
    fakes.add(max_tokens=5)
    fakes.step()
    waits, refused = fakes.add(), fakes.add()
    fakes.run()
    assert fakes.completions[waits].error_code is None
    assert fakes.completions[refused].error_code == "queue_full"


NO_EVICT = {"batch_scheduler_policy": BatchSchedulerPolicy.GUARANTEED_NO_EVICT}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_without_eviction_nothing_is_preempted(window, overlap):
    def run(settings):
        fakes = fake_engine(
            settings, num_blocks=10, max_num_seqs=4, spec=Blocks(window), overlap=overlap
        )
        for start in range(8):
            fakes.add(range(start, start + 5), max_tokens=20 if start % 2 else 3)
        fakes.run(2000)
        check_outputs(fakes)
        return fakes.engine.stats()

    assert run(NO_EVICT).preemptions == 0
    if window is None:
        assert run({}).preemptions > 0


def test_without_eviction_the_worst_case_is_kept_free():
    """6 blocks of 4: one request may need 5 (4 + 16 tokens), another 2 (4 + 4), a third 1."""
    fakes = fake_engine(NO_EVICT, num_blocks=6, max_num_seqs=3)
    long = fakes.add(range(1, 5), max_tokens=17)
    waits = fakes.add(range(5, 9), max_tokens=5)
    fits = fakes.add([1], "a", max_tokens=4)
    fakes.run()
    assert steps_of(fakes, waits)[0] > steps_of(fakes, long)[-1]
    assert steps_of(fakes, fits)[-1] < steps_of(fakes, long)[-1]
    check_outputs(fakes)


def test_without_eviction_all_that_fits_runs_together():
    fakes = fake_engine(NO_EVICT, num_blocks=10, max_num_seqs=3)
    requests = [fakes.add(range(n, n + 4), max_tokens=9) for n in (1, 5, 9)]
    fakes.step()
    assert fakes.records[0].request_ids == tuple(requests)
    fakes.run()
    assert fakes.engine.stats().preemptions == 0


def test_without_eviction_a_shared_prompt_counts_once():
    """Each may hold 5 blocks, of 9; 4 of them are shared."""
    fakes = fake_engine(NO_EVICT, num_blocks=9, max_num_seqs=6)
    sampling = SamplingParams(max_tokens=4, n=4, seed=1)
    request_id = fakes.add(range(1, 18), sampling=sampling)
    fakes.step(2)
    assert fakes.records[-1].num_rows == 4
    fakes.run()
    assert fakes.completions[request_id].token_ids == {
        i: fakes.alone(request_id, i) for i in range(4)
    }


def preempting(settings=None, **capacity):
    """Two outputs of 16 tokens, and blocks for one and a half of them."""
    fakes = fake_engine(settings, **{"num_blocks": 7, "max_num_seqs": 2, **capacity})
    return fakes, fakes.add([1, 2, 3, 4], max_tokens=16), fakes.add([5, 6, 7], max_tokens=16)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_offloaded_sequence_goes_on_where_it_was(prefix_cache, overlap):
    fakes = fake_engine(
        {"enable_prefix_cache": prefix_cache},
        num_blocks=7,
        max_num_seqs=2,
        num_host_blocks=8,
        overlap=overlap,
    )
    for prompt in ([1, 2, 3, 4], [5, 6, 7]):
        fakes.add(prompt, max_tokens=16)
    fakes.run()
    check_outputs(fakes)
    plans = fakes.runner.plans
    offloads = [plan.step_id for plan in plans if plan.block_offloads]
    loads = [plan.step_id for plan in plans if plan.block_loads]
    assert len(offloads) == len(loads) == fakes.engine.stats().preemptions == 1
    assert offloads[0] < loads[0]
    # Nothing is computed twice: 4 + 15 and 3 + 15 tokens.
    assert sum(plan.num_tokens for plan in plans) == 37


def test_without_host_memory_it_is_computed_again():
    fakes, *_ = preempting({"enable_prefix_cache": False}, num_host_blocks=1)
    fakes.run()
    check_outputs(fakes)
    assert not any(plan.block_offloads for plan in fakes.runner.plans)
    assert sum(plan.num_tokens for plan in fakes.runner.plans) > 37


def step_until_offloaded(fakes):
    for _ in range(40):
        fakes.step()
        if fakes.runner.plans[-1].block_offloads:
            return
    raise AssertionError("nothing was offloaded")


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_the_host_blocks_of_one_that_ends_while_offloaded_are_free_again(how):
    fakes = fake_engine(num_blocks=7, max_num_seqs=2, num_host_blocks=4)
    fakes.add([1, 2, 3, 4], max_tokens=16)
    gone = fakes.add([5, 6, 7], max_tokens=16, timeout_ns=20 * MILLISECOND_NS)
    step_until_offloaded(fakes)
    if how == "abort":
        fakes.engine.abort(gone)
    else:
        fakes.clock.advance(30 * MILLISECOND_NS)
        fakes.step()
    fakes.engine.check()
    fakes.run()
    assert fakes.completions[gone].is_finished
    again = [fakes.add([1, 2, 3, 4], max_tokens=16), fakes.add([5, 6, 7], max_tokens=16)]
    step_until_offloaded(fakes)
    fakes.run()
    for request_id in again:
        assert fakes.tokens(request_id) == fakes.alone(request_id)


@pytest.mark.parametrize("early", [False, True])
def test_an_offload_of_a_failed_step_is_not_trusted(early):
    fakes, old, young = preempting({"enable_prefix_cache": False}, num_host_blocks=8)
    step_until_offloaded(fakes)
    step_id = fakes.runner.plans[-1].step_id
    fakes, old, young = preempting({"enable_prefix_cache": False}, num_host_blocks=8)
    while fakes.runner.plans == [] or fakes.runner.plans[-1].step_id < step_id - 1:
        fakes.step()
    fakes.runner.fail_step(early=early)
    fakes.run()
    assert fakes.runner.plans[step_id - 1].block_offloads
    assert not any(plan.block_loads for plan in fakes.runner.plans)
    assert fakes.completions[old].error_code == "step_failed"
    assert fakes.tokens(young) == fakes.alone(young)


def test_no_more_of_an_adapter_run_than_may():
    fakes = fake_engine({"max_seqs_per_adapter": 2}, max_num_seqs=4, num_adapter_pages=3)
    crowd = [fakes.add([n], "a", max_tokens=8) for n in range(5)]
    others = [fakes.add([1], "b", max_tokens=3), fakes.add([1], "a", "b", max_tokens=3)]
    base = [fakes.add([n], max_tokens=3) for n in range(3)]
    fakes.run()
    for record in fakes.records:
        assert sum(request_id in {*crowd, others[1]} for request_id in record.request_ids) <= 2
    for request_id in (others[0], *base):
        assert steps_of(fakes, request_id)[0] < steps_of(fakes, crowd[2])[0]
    check_outputs(fakes)


def test_one_at_its_limit_does_not_keep_others_from_evicting():
    """`a` runs at its limit for long; `c` needs the page of `b`, which a later request wants."""
    fakes = fake_engine(
        {"max_seqs_per_adapter": 1, "fair_share": FairShare.NONE},
        max_num_seqs=1,
        num_adapter_pages=2,
    )
    fakes.add([1], "b", max_tokens=1)
    fakes.run()
    for _ in range(3):
        fakes.add([1], "a", max_tokens=60)
    fakes.step(4)
    fakes.add([1], "c", max_tokens=1)
    fakes.add([1], "b", max_tokens=1)
    fakes.step(8)
    assert fakes.engine.stats().adapters.copies == 3
    fakes.run()
    check_outputs(fakes)


def test_sequences_beyond_the_limit_of_an_adapter_count_as_queued():
    fakes = fake_engine({"max_seqs_per_adapter": 1, "max_queue_size": 2}, max_num_seqs=4)
    fakes.add([1], "a", max_tokens=30)
    fakes.step(3)
    waiting = [fakes.add([1], "a"), fakes.add([1], "a")]
    refused = fakes.add([1], "a")
    assert fakes.engine.stats().num_running == 1
    fakes.run()
    assert all(fakes.completions[request_id].error_code is None for request_id in waiting)
    assert fakes.completions[refused].error_code == "queue_full"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_a_deadline_ends_a_request_whose_adapter_is_on_its_way(num_steps):
    fakes = fake_engine(num_polls=2)
    request_id = fakes.add([1], "a", max_tokens=50, timeout_ns=8 * MILLISECOND_NS)
    fakes.step(num_steps)
    fakes.clock.advance(8 * MILLISECOND_NS)
    fakes.step()
    assert fakes.completions[request_id].error_code == "deadline_exceeded"
    fakes.run()


@pytest.mark.parametrize(
    "values",
    [
        {"shortest_prefill_share": 1.0},
        {"fair_input_weight": -1.0},
        {"fair_output_weight": float("nan")},
        {"max_seqs_per_adapter": -1},
    ],
)
def test_settings_name_the_bad_value(values):
    (name,) = values
    with pytest.raises(ConfigError, match=name):
        SchedulerSettings(**values)


def test_nothing_is_offloaded_into_host_blocks_that_the_same_step_loads():
    """Prompts with a window take blocks chunk by chunk: one may be preempted in the step
    in which another one was admitted again."""
    num_loads = 0
    for seed in (3, 14, 39, 58, 59, 90):
        draw = random.Random(seed)
        fakes = fake_engine(
            {
                "max_num_batched_tokens": draw.choice([24, 64]),
                "max_prefill_chunk": draw.choice([8, 16, 24]),
                "enable_prefix_cache": False,
            },
            block_size=draw.choice([1, 2]), num_blocks=draw.randint(20, 80), max_num_seqs=6,
            spec=Blocks(draw.choice([4, 8, 12])), num_host_blocks=draw.choice([6, 20, 60]),
        )  # fmt: skip
        for _ in range(10):
            prompt = range(draw.choice([3, 60, 70]))
            digests = draw.choice([(), ("a",), ("b",), ("c",)])
            priority = draw.choice([0, 0, 0, 1])
            fakes.add(prompt, *digests, max_tokens=draw.randint(1, 20), priority=priority)
            fakes.step(draw.randint(0, 4))
        fakes.run()
        check_outputs(fakes)
        num_loads += sum(len(plan.block_loads) for plan in fakes.runner.plans)
    assert num_loads > 0


def test_a_search_takes_no_more_places_of_an_adapter_than_there_are():
    settings = {"max_seqs_per_adapter": 3, "fair_share": FairShare.NONE}
    fakes = fake_engine(settings, max_num_seqs=8)
    fakes.add((1,), "b", max_tokens=20)
    beam = SamplingParams(max_tokens=6, temperature=0.0, beam=BeamSearch(width=2))
    fakes.add((1,), "a", max_tokens=8)
    fakes.add((2,), "a", max_tokens=12)
    fakes.step(4)
    search = fakes.add((3,), "a", sampling=beam)
    later = [fakes.add((n,), "a", "b", max_tokens=9) for n in (4, 5)]
    running = []
    while not fakes.engine.is_idle:
        fakes.step()
        running.append(fakes.engine.adapter_activity().running.get("a", 0))
    assert max(running) == 3
    # Who came later may not take the one place while the search waits for two.
    assert steps_of(fakes, search)[0] < min(steps_of(fakes, other)[0] for other in later)
    assert [fakes.completions[r].error_code for r in (search, *later)] == [None] * 3


def test_a_search_that_is_wider_than_an_adapter_may_have_sequences_is_refused():
    fakes = fake_engine({"max_seqs_per_adapter": 2})
    beam = SamplingParams(max_tokens=6, temperature=0.0, beam=BeamSearch(width=3))
    refused, of_base = fakes.add((3,), "a", sampling=beam), fakes.add((3,), sampling=beam)
    fakes.run()
    assert fakes.completions[refused].error_code == "invalid_parameter"
    assert "max_seqs_per_adapter" in fakes.completions[refused].outputs[-1].error.message
    assert fakes.completions[of_base].error_code is None


@pytest.mark.parametrize("prompt", [[1, 2, 3], list(range(1, 20))])
@pytest.mark.parametrize("num_blocks", [256, 40])
def test_a_request_with_many_sequences_leaves_slots_for_others(prompt, num_blocks):
    """Its sequences take six of eight slots at most, in waves; its results stay the same."""
    fakes = fake_engine(num_blocks=num_blocks, max_num_seqs=8)
    many = fakes.add(prompt, sampling=SamplingParams(max_tokens=30, n=8, seed=1))
    fakes.step(5)
    other = fakes.add([1], "a", max_tokens=1)
    fakes.step(3)
    assert fakes.completions[other].is_finished
    assert not fakes.completions[many].is_finished
    fakes.run()
    rows = [record.request_ids.count(many) for record in fakes.records]
    assert max(rows) == 6
    if num_blocks == 256:
        assert len(rows) <= 2 * 30 + 2
    check_outputs(fakes)


def test_an_aborted_wave_of_sequences_is_followed_by_the_next():
    fakes = fake_engine(max_num_seqs=8)
    many = fakes.add([1], sampling=SamplingParams(max_tokens=9, n=8, seed=1))
    fakes.step(2)
    for index in range(6):
        fakes.engine.abort(many, index)
    fakes.run()
    assert [fakes.tokens(many, index) for index in (6, 7)] == [
        fakes.alone(many, index) for index in (6, 7)
    ]


@pytest.mark.parametrize("settings", [STATIC, {"fair_share": FairShare.NONE}])
def test_a_request_takes_all_slots_where_requests_share_nothing(settings):
    fakes = fake_engine(settings, max_num_seqs=8)
    many = fakes.add([1], sampling=SamplingParams(max_tokens=3, n=8, seed=1))
    fakes.run()
    assert fakes.records[-1].request_ids.count(many) == 8
    check_outputs(fakes)
