"""While several tenants have requests, steps are short and one slot stays free."""

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.plan import StepTiming
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import FairShare, SchedulerSettings
from loraplex.scheduling.fair_share import LEAST_PART, REMEMBERED_NS
from support.capacities import changed_capacity
from support.fake_engine import EngineParts, FakeEngine
from support.fake_loader import FakeLoader
from support.fake_runner import FAKE_CAPACITY, FakeRunner

CAPACITY = changed_capacity(FAKE_CAPACITY, num_blocks=4096, max_num_seqs=8, max_model_len=8192)
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
