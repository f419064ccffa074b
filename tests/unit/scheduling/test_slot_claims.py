"""Slots are shared: a share with more than its part is preempted for one with less."""

import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, FairShare, SchedulerSettings
from loraplex.scheduling.slot_claims import MAX_PLANS_BEFORE_BEAMS, MAX_PLANS_WITHOUT_SLOT
from support.capacities import changed_capacity
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY

NUM_SLOTS = 8
FEW_STEPS = MAX_PLANS_WITHOUT_SLOT + 3
"""One more may be planned ahead, one preempts, and one computes."""
NO_EVICT = {"batch_scheduler_policy": BatchSchedulerPolicy.GUARANTEED_NO_EVICT}


def fake_engine(settings=None, *, overlap=False, num_blocks=512):
    """Return an engine whose adapters are all on the device."""
    capacity = {"block_size": 4, "num_blocks": num_blocks, "max_num_seqs": NUM_SLOTS}
    fakes = FakeEngine(
        changed_capacity(FAKE_CAPACITY, **capacity),
        SchedulerSettings(**(settings or {})),
        overlap=overlap,
    )
    for digest in "abcd":
        fakes.register(digest)
        fakes.add([1], digest, max_tokens=1)
    fakes.run()
    return fakes


def flood(fakes, *digests, num_requests=4, max_tokens=150, **options):
    """Add requests of as many sequences as there are slots."""
    sampling = SamplingParams(max_tokens=max_tokens, n=NUM_SLOTS, seed=1, ignore_eos=True)
    return [
        fakes.add([1, number], *digests, sampling=sampling, **options)
        for number in range(num_requests)
    ]


def num_rows(fakes, requests):
    """Return the rows of some requests in the newest step."""
    rows = fakes.records[-1].request_ids
    return sum(rows.count(request_id) for request_id in requests)


def preemptions(fakes):
    return fakes.engine.stats().preemptions


def check_outputs(fakes):
    for request_id, request in fakes.requests.items():
        expected = {i: fakes.alone(request_id, i) for i in range(request.sampling.n)}
        assert fakes.completions[request_id].token_ids == expected, request_id


def steps_until_finished(fakes, request_id):
    for number in range(1, 100):
        fakes.step()
        if fakes.completions[request_id].is_finished:
            return number
    pytest.fail("not finished in 100 steps")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [512, 160])
def test_many_requests_of_many_sequences_leave_slots_for_others(overlap, num_blocks):
    fakes = fake_engine(overlap=overlap, num_blocks=num_blocks)
    hostile = flood(fakes)
    fakes.step(12)
    assert num_rows(fakes, hostile) == NUM_SLOTS
    for number in range(3):
        quiet = fakes.add([number], "a", max_tokens=1)
        assert steps_until_finished(fakes, quiet) <= FEW_STEPS
        fakes.step(5)
        assert num_rows(fakes, hostile) == NUM_SLOTS, "its slot stays empty"
    assert preemptions(fakes) <= 3 or num_blocks < 512
    fakes.run(3000)
    check_outputs(fakes)


def test_a_share_alone_has_all_slots_and_is_never_preempted():
    fakes = fake_engine()
    requests = flood(fakes, "a", num_requests=2, max_tokens=20)
    fakes.step(12)
    assert num_rows(fakes, requests) == NUM_SLOTS
    fakes.run()
    assert preemptions(fakes) == 0


def test_two_floods_have_half_of_the_slots_each():
    fakes = fake_engine()
    first = flood(fakes, "a")
    fakes.step(12)
    second = flood(fakes, "b")
    fakes.step(2 * FEW_STEPS)
    assert (num_rows(fakes, first), num_rows(fakes, second)) == (4, 4)
    num_preempted = preemptions(fakes)
    fakes.step(50)
    assert preemptions(fakes) == num_preempted == 4
    fakes.run(3000)
    check_outputs(fakes)


def test_a_share_that_was_served_more_claims_its_part_too():
    """It is later in the order than the share that makes way for it."""
    fakes = fake_engine()
    fakes.add([1], "b", max_tokens=150)
    sampling = SamplingParams(max_tokens=100, n=6, seed=1, ignore_eos=True)
    fakes.add([1], "a", sampling=sampling)
    fakes.step(105)
    flood(fakes, "b")
    fakes.step(FEW_STEPS)
    shares = fakes.engine._scheduler._state.shares
    counters = [shares.counter((fakes.register(digest),)) for digest in "ab"]
    assert counters[1] < counters[0] - 200
    quiet = fakes.add([1], "a", max_tokens=1)
    assert steps_until_finished(fakes, quiet) <= FEW_STEPS


def test_a_share_keeps_its_only_slot():
    fakes = fake_engine()
    for number in range(NUM_SLOTS + 1):
        fakes.register(f"one {number}")
        fakes.add([1], f"one {number}", max_tokens=60)
    fakes.step(50)
    assert preemptions(fakes) == 0
    fakes.run()
    check_outputs(fakes)


def test_parts_are_by_weight():
    fakes = fake_engine()
    light = flood(fakes, "a")
    fakes.step(12)
    heavy = flood(fakes, "b", share_weight=3.0)
    fakes.step(2 * FEW_STEPS)
    assert (num_rows(fakes, light), num_rows(fakes, heavy)) == (2, 6)


@pytest.mark.parametrize("fair_share", [FairShare.TENANT, FairShare.TENANT_ADAPTER])
def test_a_tenant_claims_slots_from_another(fair_share):
    fakes = fake_engine({"fair_share": fair_share})
    for digests in ("ab", "c"):
        flood(fakes, *digests, tenant="them")
    fakes.step(12)
    quiet = fakes.add([1], "d", max_tokens=1, tenant="us")
    assert steps_until_finished(fakes, quiet) <= FEW_STEPS


def test_a_share_claims_its_part_once_for_all_its_adapters():
    fakes = fake_engine({"fair_share": FairShare.TENANT})
    fakes.add([1], "d", max_tokens=200, tenant="others")
    flood(fakes, "d", tenant="them")
    fakes.step(12)
    requests = [fakes.add([n], "abc"[n % 3], max_tokens=90, tenant="us") for n in range(6)]
    fakes.step(2 * FEW_STEPS)
    assert num_rows(fakes, requests) == NUM_SLOTS // 3
    assert preemptions(fakes) == NUM_SLOTS // 3 - 1, "one slot was free"


def test_a_claim_preempts_no_sequence_of_higher_priority():
    fakes = fake_engine()
    flood(fakes, "a", priority=-1)
    fakes.step(12)
    fakes.add([1], "b", max_tokens=1)
    fakes.step(30)
    assert preemptions(fakes) == 0


def test_a_claim_preempts_nothing_while_slots_come_free():
    fakes = fake_engine()
    for number in range(200):
        fakes.add([number], "a", max_tokens=3 + number % 5)
    fakes.step(5)
    for _ in range(20):
        quiet = fakes.add([1], "b", max_tokens=1)
        assert steps_until_finished(fakes, quiet) <= FEW_STEPS
    assert preemptions(fakes) == 0


@pytest.mark.parametrize("settings", [NO_EVICT, {"fair_share": FairShare.NONE}])
def test_nothing_is_preempted_where_nothing_may_be(settings):
    fakes = fake_engine(settings)
    flood(fakes)
    fakes.add([1], "a", max_tokens=1)
    fakes.run(3000)
    assert preemptions(fakes) == 0
    check_outputs(fakes)


def test_a_prompt_that_lacks_blocks_gets_them_from_the_share_that_has_too_many():
    fakes = fake_engine(num_blocks=60)
    for number in range(7):
        fakes.add([number] * 20, max_tokens=100)
    fakes.step(8)
    quiet = fakes.add([9] * 40, "a", max_tokens=1)
    assert steps_until_finished(fakes, quiet) <= 2 * FEW_STEPS
    fakes.run(3000)
    check_outputs(fakes)


def beam_search(fakes, number=1, max_tokens=60, **options):
    """Add a beam search that takes all slots."""
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, beam=BeamSearch(width=NUM_SLOTS)
    )
    return fakes.add([1, number], sampling=sampling, **options)


BY_TENANT = {"fair_share": FairShare.TENANT}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [512, 200])
def test_beams_with_all_slots_give_way_to_another_share(overlap, num_blocks):
    fakes = fake_engine(BY_TENANT, overlap=overlap, num_blocks=num_blocks)
    hostile = [beam_search(fakes, number, tenant="hostile") for number in range(3)]
    fakes.step(12)
    assert num_rows(fakes, hostile) == NUM_SLOTS
    for number in range(3):
        quiet = fakes.add([number], max_tokens=2, tenant="quiet")
        assert steps_until_finished(fakes, quiet) <= MAX_PLANS_BEFORE_BEAMS + 4
        fakes.step(20)
        assert num_rows(fakes, hostile) == NUM_SLOTS, "the beams have their slots again"
    fakes.run(3000)
    alone = fake_engine(BY_TENANT)
    for number, request_id in enumerate(hostile):
        expected = beam_search(alone, number)
        alone.run(3000)
        found = fakes.completions[request_id].token_ids
        assert found == alone.completions[expected].token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_beams_are_back_within_few_steps(overlap):
    """They compute again together what they share no blocks for: others wait for them meanwhile."""
    settings = BY_TENANT | {"enable_prefix_cache": False}
    fakes = fake_engine(settings, overlap=overlap)
    hostile = beam_search(fakes, tenant="hostile")
    fakes.step(12)
    for number in range(3):
        quiet = fakes.add([number], max_tokens=1, tenant="quiet")
        steps_until_finished(fakes, quiet)
        num_steps = 0
        while num_rows(fakes, [hostile]) < NUM_SLOTS:
            fakes.step()
            num_steps += 1
        assert num_steps <= 5, "one step at least for each beam, if they return one by one"
        fakes.step(10)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_make_progress_under_a_stream_of_small_requests(prefix_cache):
    """Each request of the other share takes their slots; in between they gain tokens."""
    settings = BY_TENANT | {"max_num_batched_tokens": 16, "enable_prefix_cache": prefix_cache}
    fakes = fake_engine(settings)
    hostile = beam_search(fakes, tenant="hostile", max_tokens=30)
    fakes.step(4)
    for _ in range(200):
        quiet = fakes.add([2], max_tokens=1, tenant="quiet")
        steps_until_finished(fakes, quiet)
        if fakes.completions[hostile].is_finished:
            break
    assert fakes.completions[hostile].is_finished
    assert preemptions(fakes)


def test_beams_beyond_the_part_of_their_share_take_no_slots_from_a_claim():
    """Three beams, where each of four shares has two slots: they wait until no share claims any."""
    fakes = fake_engine()
    flood(fakes, "a")
    fakes.add([1], "b", max_tokens=200)
    fakes.step(3)
    beams = SamplingParams(max_tokens=5, temperature=0.0, beam=BeamSearch(width=3))
    wide = fakes.add([1], "c", sampling=beams)
    small = fakes.add([1], "d", max_tokens=1)
    assert steps_until_finished(fakes, small) <= FEW_STEPS
    fakes.run(3000)
    assert fakes.completions[wide].is_finished


def test_a_share_alone_loses_no_beams():
    fakes = fake_engine(BY_TENANT)
    first, second = (beam_search(fakes, number, tenant="one") for number in range(2))
    fakes.run(3000)
    assert fakes.completions[first].is_finished
    assert fakes.completions[second].is_finished
    assert preemptions(fakes) == 0
