"""While several tenants have requests, steps are short and one slot stays free."""

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.plan import StepTiming
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import FairShare, SchedulerSettings
from loraplex.core.task import Pool, PoolKind
from loraplex.scheduling.fair_share import LEAST_PART, REMEMBERED_NS
from support.capacities import changed_capacity
from support.fake_engine import EngineParts, FakeEngine
from support.fake_loader import FakeLoader
from support.fake_runner import FAKE_CAPACITY, FakeRunner

CAPACITY = msgspec.structs.replace(
    changed_capacity(FAKE_CAPACITY, num_blocks=4096, max_num_seqs=8, max_model_len=8192),
    pool_kinds=tuple(PoolKind),
)
NS_PER_TOKEN = 100_000
"""Duration of a prompt's token: 20 ms are 200 tokens."""
NUM_IN_TARGET = 200


class TimedRunner(FakeRunner):
    """A step takes as long as its tokens."""

    def _execute(self, plan):
        num_tokens = sum(row.num_tokens for row in plan.rows)
        timing = StepTiming(forward_ns=NS_PER_TOKEN * num_tokens)
        return msgspec.structs.replace(super()._execute(plan), timing=timing)


def timed_engine(**settings):
    loader = FakeLoader(1)
    runner = TimedRunner(CAPACITY, None, loader)
    settings = {
        "shared_step_seconds": 0.02,
        "max_num_batched_tokens": 1024,
        "fair_share": FairShare.TENANT,
    } | settings
    parts = EngineParts(runner, runner, loader)
    return FakeEngine(CAPACITY, SchedulerSettings(**settings), parts=parts)


def add_prompt(fakes, tenant, num_tokens=6000):
    number = len(fakes.requests)
    prompt = [number, *(at % 90 for at in range(num_tokens - 1))]
    return fakes.add(prompt, tenant=tenant, max_tokens=1)


def largest_steps(fakes, num_steps):
    fakes.step(num_steps)
    return max(record.num_tokens for record in fakes.records[-num_steps:])


def test_steps_are_as_long_as_the_target_while_tenants_share():
    fakes = timed_engine()
    add_prompt(fakes, "a")
    assert largest_steps(fakes, 5) == 1024, "alone"
    small = add_prompt(fakes, "b", 4)
    fakes.step()
    assert fakes.completions[small].is_finished
    add_prompt(fakes, "a")
    fakes.step(20)
    assert largest_steps(fakes, 5) == pytest.approx(NUM_IN_TARGET, abs=10)
    fakes.clock.advance(REMEMBERED_NS)
    add_prompt(fakes, "a")
    assert largest_steps(fakes, 5) == 1024, "alone again"
    fakes.run()


def test_slow_machines_compute_some_tokens():
    fakes = timed_engine(shared_step_seconds=0.001)
    for tenant in "aba":
        add_prompt(fakes, tenant)
    fakes.step(20)
    assert largest_steps(fakes, 5) == 1024 // LEAST_PART


def test_without_a_target_steps_are_full():
    fakes = timed_engine(shared_step_seconds=0)
    for tenant in "aba":
        add_prompt(fakes, tenant)
    assert largest_steps(fakes, 10) == 1024


@pytest.mark.parametrize("kind", [FairShare.TENANT, FairShare.ADAPTER])
def test_a_slot_stays_free_where_tenants_share(kind):
    fakes = timed_engine(fair_share=kind)
    add_prompt(fakes, "quiet", 4)
    fakes.run()
    many = SamplingParams(max_tokens=100, n=8, seed=1, ignore_eos=True)
    for number in range(3):
        fakes.add([1, number], tenant="hostile", sampling=many)
    fakes.step(6)
    has_free = kind is FairShare.TENANT
    assert len(fakes.records[-1].request_ids) == 8 - has_free
    small = add_prompt(fakes, "quiet", 4)
    fakes.step()
    assert fakes.completions[small].is_finished == has_free
    fakes.run(2000)


def test_a_tenant_below_its_part_takes_the_last_slot():
    fakes = timed_engine()
    many = SamplingParams(max_tokens=100, n=8, seed=1, ignore_eos=True)
    for tenant in ("a", "b"):
        fakes.add([1], tenant=tenant, sampling=many)
    fakes.step(12)
    assert len(fakes.records[-1].request_ids) == 8
    fakes.run(2000)


def test_beams_as_wide_as_the_server_find_their_slots():
    fakes = timed_engine(fair_share=FairShare.TENANT)
    add_prompt(fakes, "quiet", 4)
    fakes.run()
    beams = SamplingParams(max_tokens=4, temperature=0.0, beam=BeamSearch(width=8))
    request = fakes.add([1], tenant="hostile", sampling=beams)
    fakes.run()
    assert fakes.completions[request].error_code is None


def test_wide_beam_searches_take_turns_while_tenants_share():
    fakes = timed_engine(max_num_batched_tokens=24)  # an eighth are 3 rows
    beams = SamplingParams(max_tokens=6, temperature=0.0, beam=BeamSearch(width=2))
    searches = [fakes.add([number], tenant="a", sampling=beams) for number in range(1, 4)]
    fakes.step(2)
    assert len(fakes.records[-1].request_ids) == 6, "alone, all beams are in each step"
    add_prompt(fakes, "b", 4)
    fakes.step()
    turns = []
    for _ in range(6):
        fakes.step()
        turns.append(sorted(set(fakes.records[-1].request_ids)))
    assert sorted(map(tuple, turns[:3])) == [(search,) for search in searches]
    assert turns[3:] == turns[:3]
    fakes.run()
    assert all(fakes.completions[search].is_finished for search in searches)


LAST, MEAN = Pool(PoolKind.LAST), Pool(PoolKind.MEAN)


def add_pooled(fakes, num_tokens, task=LAST, **arguments):
    number = len(fakes.requests)
    prompt = [number, *(at % 90 for at in range(num_tokens - 1))]
    return fakes.add(prompt, task=task, **arguments)


def sizes(fakes):
    """Return the tokens of each step so far, without those that decode."""
    return [
        sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        for plan in fakes.runner.plans
    ]


def stepped_until(fakes, request, limit):
    """Return how many steps a request takes to its end, at most the limit."""
    for number in range(1, limit + 1):
        fakes.step()
        if fakes.completions[request].is_finished:
            return number
    raise AssertionError(f"request {request} did not end in {limit} steps")


def with_streams(*, num_streams=2, **settings):
    """An engine that has measured its steps, and decodes so many streams."""
    fakes = timed_engine(**settings)
    add_prompt(fakes, "a", 8192 - 1)
    fakes.run()
    fakes.step(1)
    for number in range(num_streams):
        fakes.add([number], max_tokens=4000, tenant="a")
    fakes.step(2)
    fakes.runner.plans.clear()
    return fakes


def test_vectors_take_short_steps_while_texts_are_written():
    fakes = with_streams()
    fakes.engine._scheduler._shared._num_in_target = NUM_IN_TARGET
    texts = [add_pooled(fakes, 100, tenant="a") for _ in range(20)]
    steps = stepped_until(fakes, texts[-1], 20)
    assert max(sizes(fakes)) <= NUM_IN_TARGET
    assert steps == pytest.approx(20 * 100 / NUM_IN_TARGET, abs=2), "the target is used up"
    assert all(fakes.completions[text].is_finished for text in texts)


def test_vectors_alone_have_full_steps():
    fakes = timed_engine()
    for _ in range(20):
        add_pooled(fakes, 200, tenant="a")
    fakes.run()
    assert max(sizes(fakes)) > 1024 - 100


def test_prompts_of_texts_are_not_limited_with_vectors():
    fakes = with_streams()
    fakes.engine._scheduler._shared._num_in_target = NUM_IN_TARGET
    add_pooled(fakes, 4000, tenant="a")
    long = add_prompt(fakes, "a", 3000)
    assert stepped_until(fakes, long, 5) == 4
    assert max(sizes(fakes)) == 1024 - 2


def test_without_a_target_vectors_take_full_steps():
    fakes = with_streams(shared_step_seconds=0)
    for _ in range(20):
        add_pooled(fakes, 200, tenant="a")
    fakes.step(5)
    assert max(sizes(fakes)) > 1024 - 100


def test_a_span_that_is_longer_than_the_target_has_a_step_without_other_vectors():
    fakes = with_streams(num_streams=1)
    fakes.engine._scheduler._shared._num_in_target = NUM_IN_TARGET
    spans = [add_pooled(fakes, 700, MEAN, tenant="a") for _ in range(3)]
    spans += [add_pooled(fakes, 60, MEAN, tenant="a") for _ in range(6)]
    stepped_until(fakes, spans[-1], 10)
    assert sorted(filter(None, sizes(fakes))) == [180, 180, 700, 700, 700]
    assert all(fakes.completions[span].is_finished for span in spans)


@pytest.mark.parametrize("task", [LAST, MEAN])
def test_short_vectors_do_not_starve_a_long_one(task):
    """Short ones come in each step, and fill the target."""
    fakes = with_streams(num_streams=1)
    fakes.engine._scheduler._shared._num_in_target = NUM_IN_TARGET
    long = add_pooled(fakes, 900, task, tenant="a")
    for number in range(900 // (NUM_IN_TARGET // 4)):
        if fakes.completions[long].is_finished:
            break
        for _ in range(4):
            add_pooled(fakes, 60, LAST if number % 2 else MEAN, tenant="a")
        fakes.step()
    assert fakes.completions[long].is_finished


def test_a_short_vector_does_not_wait_for_a_long_one():
    fakes = with_streams(num_streams=1)
    fakes.engine._scheduler._shared._num_in_target = NUM_IN_TARGET
    long = add_pooled(fakes, 5000, tenant="a")
    fakes.step(2)
    short = add_pooled(fakes, 90, tenant="a")
    assert stepped_until(fakes, short, 2) == 1
    assert not fakes.completions[long].is_finished
