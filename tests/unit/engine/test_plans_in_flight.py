"""Several plans are in flight, one for each stage of a pipeline: same tokens, no idle stage."""

from collections import Counter

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.engine.step_marker import MAX_STEPS, StepMarker
from support.capacities import changed_capacity
from support.fake_engine import FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY

NUM_STAGES = 3
STAGES = changed_capacity(FAKE_CAPACITY, num_stages=NUM_STAGES)


@pytest.fixture
def fakes():
    return FakeEngine(STAGES)


def launched(fakes):
    """Plans launched so far, whether computed or not."""
    return fakes.engine.stats().steps


def num_in_flight(fakes):
    return launched(fakes) - len(fakes.runner.plans)


def sizes(fakes, first, last=None):
    """Number of rows of each computed plan."""
    return [len(plan.rows) for plan in fakes.runner.plans[first:last]]


def decoding(fakes, num_requests, max_tokens=60):
    """Add requests of one prompt token, and step until all decode."""
    request_ids = [
        fakes.add([10 + number], max_tokens=max_tokens, eos_token_ids=())
        for number in range(num_requests)
    ]
    while not all(map(fakes.tokens, request_ids)):
        fakes.step()
    return request_ids


def check_all(fakes, request_ids):
    for request_id in request_ids:
        assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_chunks_of_a_prompt_fill_the_pipeline():
    fakes = FakeEngine(STAGES, SchedulerSettings(max_num_batched_tokens=8))
    request_id = fakes.add(range(1, 31), max_tokens=3)
    fakes.step()
    assert (launched(fakes), num_in_flight(fakes)) == (3, 2)
    fakes.engine.check()
    fakes.run()
    rows = [plan.rows[0] for plan in fakes.runner.plans]
    assert [(row.start, row.num_tokens) for row in rows] == [
        (0, 8), (8, 8), (16, 8), (24, 6), (30, 1), (31, 1),
    ]  # fmt: skip
    check_all(fakes, [request_id])


def test_a_sequence_waits_for_its_own_token(fakes):
    """The first stage does not know what the last one samples."""
    (request_id,) = decoding(fakes, 1, max_tokens=5)
    for _ in range(2):
        fakes.step()
        assert num_in_flight(fakes) == 0
    fakes.run()
    check_all(fakes, [request_id])


@pytest.mark.parametrize(
    ("num_requests", "expected"), [(8, [3, 3, 2]), (4, [2, 1, 1]), (2, [1, 1])]
)
def test_rows_are_divided_between_the_plans(fakes, num_requests, expected):
    request_ids = decoding(fakes, num_requests)
    first = len(fakes.runner.plans)
    fakes.step(12)
    assert sizes(fakes, first, first + len(expected)) == expected
    assert sizes(fakes, first) == (expected * 12)[:12]
    assert num_in_flight(fakes) == min(NUM_STAGES, num_requests) - 1
    fakes.run()
    check_all(fakes, request_ids)


def test_groups_become_equal_again(fakes):
    """Six requests begin together, and one each in the two plans after theirs."""
    fakes.step()
    late = [fakes.add([1], max_tokens=60, eos_token_ids=()) for _ in range(6)]
    fakes.step()
    late.append(fakes.add(range(20), max_tokens=60, eos_token_ids=()))
    fakes.step()
    late.append(fakes.add(range(30, 50), max_tokens=60, eos_token_ids=()))
    fakes.step(9)
    first = len(fakes.runner.plans)
    fakes.step(6)
    assert sorted(sizes(fakes, first, first + 3)) == [2, 3, 3]
    fakes.run()
    check_all(fakes, late)


def test_no_sequence_is_passed_over(fakes):
    """Each decoding sequence is in one of any two rounds of the pipeline."""
    decoding(fakes, 7)
    for _ in range(10):
        fakes.step()
        fakes.engine.check()
    plans = [{row.slot for row in plan.rows} for plan in fakes.runner.plans[-9:]]
    counts = Counter(slot for slots in plans for slot in slots)
    assert counts == dict.fromkeys(range(7), 3)


def test_no_empty_plan_is_launched_while_others_are_in_flight():
    """It would wait for the end of an adapter copy, and later steps would wait for it."""
    fakes = FakeEngine(STAGES, copy_steps=2)
    fakes.register("a")
    fakes.add([1], max_tokens=9, eos_token_ids=())
    waiting = fakes.add([1], "a", max_tokens=2)
    while not fakes.completions[waiting].is_finished:
        fakes.step()
    idle = [plan for plan in fakes.runner.plans if not plan.rows]
    assert all(plan.adapter_copies for plan in idle)
    fakes.run()


@pytest.mark.parametrize("early", [False, True])
def test_the_steps_after_a_failed_one_are_computed_later(early):
    fakes = FakeEngine(STAGES, SchedulerSettings(max_num_batched_tokens=8))
    marker = StepMarker()
    fakes.engine.mark_steps(marker)
    failed = fakes.add(range(1, 9), max_tokens=9)
    later = [fakes.add(range(11, 40), max_tokens=9), fakes.add(range(50, 70), max_tokens=9)]
    fakes.runner.fail_step(early=early)
    fakes.step()
    assert fakes.completions[failed].error_code == "step_failed"
    assert marker.request_ids() == frozenset()
    assert (len(fakes.runner.plans), launched(fakes)) == (1, NUM_STAGES)
    fakes.engine.check()
    fakes.run()
    check_all(fakes, later)


def test_all_steps_in_flight_are_marked(fakes):
    marker = StepMarker()
    fakes.engine.mark_steps(marker)
    request_ids = decoding(fakes, 3)
    fakes.step()
    assert len(marker.request_ids()) == NUM_STAGES - 1
    assert marker.request_ids() < set(request_ids)


def test_more_stages_than_the_marker_has_records():
    problem = rf"at most {MAX_STEPS} plans .* {MAX_STEPS} pipeline stages and overlap"
    with pytest.raises(ConfigError, match=problem):
        FakeEngine(changed_capacity(FAKE_CAPACITY, num_stages=MAX_STEPS), overlap=True)


@pytest.mark.parametrize("field", ["return_logits", "return_prompt_logits"])
def test_logits_that_the_last_stage_cannot_return_are_refused(field):
    fakes = FakeEngine(changed_capacity(STAGES, returns_logits=False))
    sampling = SamplingParams(max_tokens=1, **{field: True})
    refused = fakes.add([1], sampling=sampling)
    fakes.run()
    error = fakes.completions[refused].outputs[-1].error
    assert (error.code, error.param) == ("invalid_parameter", field)
    assert "pipeline_parallel_size" in error.message


def test_a_preemption_waits_until_nothing_is_in_flight():
    settings = SchedulerSettings(batch_scheduler_policy=BatchSchedulerPolicy.MAX_UTILIZATION)
    fakes = FakeEngine(changed_capacity(STAGES, num_blocks=6, block_size=4), settings)
    request_ids = [fakes.add([token, 2, 3], max_tokens=14) for token in (1, 2, 3)]
    fakes.run()
    assert fakes.engine.stats().preemptions > 0
    check_all(fakes, request_ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_outputs_are_those_of_one_plan_at_a_time(num_stages, overlap):
    def outputs(num_stages, overlap):
        fakes = FakeEngine(
            changed_capacity(FAKE_CAPACITY, num_stages=num_stages, num_blocks=24),
            SchedulerSettings(
                batch_scheduler_policy=BatchSchedulerPolicy.MAX_UTILIZATION,
                max_num_batched_tokens=16,
                num_draft_tokens=2,
            ),
            overlap=overlap,
            model=FakeModel(eos_rate=0.1),
        )
        fakes.register("a")
        for index in range(12):
            sampling = SamplingParams(max_tokens=40, n=1 + index % 3, seed=index, logprobs=1)
            fakes.add([index, *range(7, 40)], *("a" * (index % 2)), sampling=sampling)
            fakes.step()
        fakes.run()
        return {
            request_id: (completion.token_ids, completion.finish_reasons)
            for request_id, completion in fakes.completions.items()
        }

    assert outputs(num_stages, overlap) == outputs(1, overlap=False)
