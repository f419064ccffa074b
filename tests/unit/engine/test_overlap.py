"""The next step is planned while one runs: same tokens, and nothing is freed too early."""

import pytest

from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.engine.step_marker import StepMarker
from support.capacities import changed_capacity
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY

EVICTING = SchedulerSettings(batch_scheduler_policy=BatchSchedulerPolicy.MAX_UTILIZATION)


@pytest.fixture
def fakes():
    return FakeEngine(overlap=True)


def num_in_flight(fakes):
    return fakes.engine.stats().steps - len(fakes.runner.plans)


def rows_of(plan):
    return [row.slot for row in plan.rows]


def check_all(fakes, request_ids):
    for request_id in request_ids:
        assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_one_step_is_in_flight_between_two_calls(fakes):
    request_id = fakes.add([1, 2], max_tokens=5)
    for num_computed in (1, 2, 3, 4):
        fakes.step()
        assert (num_in_flight(fakes), len(fakes.runner.plans)) == (1, num_computed)
        assert len(fakes.tokens(request_id)) == num_computed
        assert not fakes.engine.is_idle
        assert fakes.engine.next_wake_ns() == fakes.clock.now_ns()
        fakes.engine.check()
    fakes.run()
    check_all(fakes, [request_id])


def test_a_row_goes_on_from_a_token_that_is_not_known_yet(fakes):
    fakes.add([1, 2], max_tokens=5)
    fakes.run()
    first, *others = (plan.rows[0] for plan in fakes.runner.plans if plan.rows)
    assert first.token_ids == (1, 2)
    assert [(row.token_ids, row.start) for row in others] == [
        (None, 2), (None, 3), (None, 4), (None, 5),
    ]  # fmt: skip


def test_chunks_of_a_prompt_follow_each_other(fakes):
    fakes = FakeEngine(settings=SchedulerSettings(max_num_batched_tokens=8), overlap=True)
    request_id = fakes.add(range(1, 31), max_tokens=3)
    fakes.step()
    assert num_in_flight(fakes) == 1
    fakes.run()
    starts = [(plan.rows[0].start, plan.rows[0].num_tokens) for plan in fakes.runner.plans]
    assert starts == [(0, 8), (8, 8), (16, 8), (24, 6), (30, 1), (31, 1)]
    check_all(fakes, [request_id])


def test_what_must_end_is_not_computed_again(fakes):
    request_id = fakes.add([1], max_tokens=3, eos_token_ids=())
    fakes.run()
    assert len(fakes.runner.plans) == 3
    check_all(fakes, [request_id])


def test_what_ends_by_a_token_is_computed_once_more():
    fakes = FakeEngine(overlap=True, model=FakeModel(eos_rate=1.0))
    request_id = fakes.add([1], max_tokens=9)
    fakes.step()
    assert fakes.completions[request_id].finish_reasons == {0: "stop"}
    assert fakes.engine.stats().num_running == 0
    assert fakes.engine.stats().blocks_held == 1, "the step in flight writes there"
    fakes.engine.check()
    assert not fakes.engine.is_idle
    fakes.step()
    assert fakes.engine.stats().blocks_held == 0
    fakes.run()
    assert [rows_of(plan) for plan in fakes.runner.plans] == [[0], [0]]
    assert len(fakes.tokens(request_id)) == 1


def test_slots_and_blocks_of_a_step_in_flight_are_not_taken():
    capacity = changed_capacity(FAKE_CAPACITY, max_num_seqs=1, num_blocks=1)
    fakes = FakeEngine(capacity, overlap=True, model=FakeModel(eos_rate=1.0))
    first, second = (fakes.add([token], max_tokens=9) for token in (1, 2))
    fakes.step()
    assert fakes.completions[first].is_finished
    fakes.step()
    assert not any(plan.added for plan in fakes.runner.plans[1:])
    fakes.run()
    assert fakes.runner.plans[2].removed == (0,)
    assert fakes.completions[second].is_finished


def test_an_adapter_of_a_step_in_flight_stays():
    capacity = changed_capacity(FAKE_CAPACITY, num_adapter_pages=1)
    fakes = FakeEngine(capacity, overlap=True)
    for digest in "ab":
        fakes.register(digest)
    first = fakes.add([1], "a", max_tokens=9)
    while not fakes.tokens(first):
        fakes.step()
    second = fakes.add([1], "b", max_tokens=2)
    fakes.engine.abort(first)
    fakes.engine.forget_adapter("a")
    assert num_in_flight(fakes) == 1
    fakes.engine.check()
    fakes.run()
    check_all(fakes, [second])


def test_an_abort_in_flight(fakes):
    aborted, other = fakes.add([1], max_tokens=9), fakes.add([2], max_tokens=9)
    fakes.step(3)
    fakes.engine.abort(aborted)
    fakes.engine.check()
    assert fakes.engine.stats().num_running == 1
    num_tokens = len(fakes.tokens(aborted))
    fakes.run()
    assert fakes.completions[aborted].finish_reasons == {0: "abort"}
    assert fakes.tokens(aborted) == fakes.alone(aborted)[:num_tokens]
    check_all(fakes, [other])


def test_a_deadline_in_flight(fakes):
    late = fakes.add([1], max_tokens=99, timeout_ns=3 * MILLISECOND_NS)
    other = fakes.add([2], max_tokens=20)
    fakes.run()
    assert fakes.completions[late].error_code == "deadline_exceeded"
    check_all(fakes, [other])


def test_a_failed_row_in_flight(fakes):
    fakes.runner.fail_rows()
    failed = fakes.add([1], max_tokens=9)
    other = fakes.add([2], max_tokens=9)
    fakes.run()
    assert fakes.completions[failed].error_code == "row_failed"
    check_all(fakes, [other])


@pytest.mark.parametrize("early", [False, True])
def test_a_step_behind_a_failed_one_is_computed_later(early):
    """A request that was only in the next step continues as if nothing had happened."""
    fakes = FakeEngine(overlap=True)
    marker = StepMarker()
    fakes.engine.mark_steps(marker)
    failed = fakes.add([1], max_tokens=9)
    fakes.step()
    behind = fakes.add(range(11, 40), max_tokens=9)
    fakes.runner.fail_step(early=early)
    fakes.step()
    assert fakes.completions[failed].error_code == "step_failed"
    assert fakes.completions[behind].outputs == []
    assert len(fakes.runner.plans) == 2
    assert num_in_flight(fakes) == 1, "the next step was launched, and is never computed"
    assert marker.request_ids() == frozenset()
    assert fakes.engine.stats().preemptions == 1
    fakes.engine.check()
    fakes.run()
    check_all(fakes, [behind])


def test_both_steps_in_flight_are_marked(fakes):
    marker = StepMarker()
    fakes.engine.mark_steps(marker)
    seen = []
    execute = fakes.runner.launch

    def launch(plan):
        seen.append(marker.request_ids())
        return execute(plan)

    fakes.runner.launch = launch
    fakes.add([1], max_tokens=2)
    fakes.step()
    assert seen == [{1}]
    fakes.add([2], max_tokens=2)
    fakes.step()
    assert seen[1] == {1, 2}, "the step that is waited for has 1, the next one 2"


def test_the_copies_of_a_failed_step_and_of_the_one_behind_start_again(fakes):
    for digest in "ab":
        fakes.register(digest)
    running = fakes.add([1], max_tokens=20)
    fakes.step()
    waiting = [fakes.add([1], digest, max_tokens=3) for digest in "ab"]
    fakes.step()
    fakes.runner.fail_step(early=True)
    fakes.step()
    assert fakes.completions[running].error_code == "step_failed"
    fakes.run()
    check_all(fakes, waiting)


def test_draft_tokens_wait_for_the_token_before_them():
    settings = SchedulerSettings(num_draft_tokens=3)
    capacity = changed_capacity(FAKE_CAPACITY, vocab_size=4)
    fakes = FakeEngine(capacity, settings, overlap=True)
    drafted = fakes.add([1, 2, 3] * 4, max_tokens=12, eos_token_ids=())
    plain = fakes.add([1, 2], sampling=SamplingParams(max_tokens=12, num_draft_tokens=0))
    fakes.run()
    check_all(fakes, [drafted, plain])
    plans = [set(rows_of(plan)) for plan in fakes.runner.plans if plan.rows]
    assert plans[:4] == [{0, 1}, {1}, {0, 1}, {1}]
    assert any(row.draft_token_ids for plan in fakes.runner.plans for row in plan.rows)


def test_logits_are_not_computed_in_vain():
    """Their files would never be deleted: such a row is planned when the token before is known."""
    fakes = FakeEngine(overlap=True, model=FakeModel(eos_rate=1.0))
    fakes.add([1], sampling=SamplingParams(max_tokens=9, return_logits=True))
    fakes.run()
    assert len(fakes.runner.plans) == 1


def test_no_sequence_is_preempted_while_in_flight():
    capacity = changed_capacity(FAKE_CAPACITY, num_blocks=6, block_size=4)
    fakes = FakeEngine(capacity, EVICTING, overlap=True)
    request_ids = [fakes.add([token, 2, 3], max_tokens=14) for token in (1, 2, 3)]
    for _ in range(100):
        if fakes.engine.is_idle:
            break
        fakes.step()
        fakes.engine.check()
    fakes.run()
    assert fakes.engine.stats().preemptions > 0
    check_all(fakes, request_ids)


def test_the_first_request_gets_the_block_that_it_needs():
    """The last free block went to the second one a step before, which then needs none for long."""
    fakes = FakeEngine(changed_capacity(FAKE_CAPACITY, num_blocks=3), EVICTING, overlap=True)
    first, second = (
        fakes.add(range(1, size), max_tokens=25, eos_token_ids=()) for size in (11, 12)
    )
    fakes.step(12)
    assert fakes.engine.stats().preemptions == 1
    assert len(fakes.tokens(first)) > len(fakes.tokens(second))
    fakes.run()
    check_all(fakes, [first, second])


def test_a_step_fails_after_a_request_in_it_was_aborted(fakes):
    aborted, failed = fakes.add([1], max_tokens=9), fakes.add([2], max_tokens=9)
    fakes.step()
    fakes.engine.abort(aborted)
    fakes.runner.fail_step()
    fakes.step()
    assert fakes.completions[aborted].finish_reasons == {0: "abort"}
    assert fakes.completions[failed].error_code == "step_failed"
    fakes.run()


def test_both_loops_give_the_same_outputs():
    def outputs(overlap):
        fakes = FakeEngine(settings=EVICTING, overlap=overlap, model=FakeModel(eos_rate=0.1))
        fakes.register("a")
        for index in range(12):
            sampling = SamplingParams(max_tokens=15, n=1 + index % 3, seed=index, logprobs=1)
            fakes.add([index, 7, 8], *("a" * (index % 2)), sampling=sampling)
            fakes.step()
        fakes.run()
        return {
            request_id: (completion.token_ids, completion.finish_reasons)
            for request_id, completion in fakes.completions.items()
        }

    assert outputs(overlap=True) == outputs(overlap=False)
