"""Adapters come to the device during the steps, and no request is passed over for ever."""

import re

import pytest

from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, FairShare, SchedulerSettings
from loraplex.scheduling.adapters import AdapterScan
from loraplex.scheduling.planner import MAX_LATER_QUEUES, MAX_PREFETCHED_QUEUES
from support.capacities import changed_capacity
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming

AGING_NS = 20 * MILLISECOND_NS
NUM_STEPS_OF_LOAD = 4
"""Steps in which an adapter is loaded, copied and used."""


def fake_engine(*, settings=None, host_bytes=1_000_000, num_polls=1, copy_steps=0, **capacity):
    capacity = {"max_num_seqs": 4, "num_adapter_pages": 2, **capacity}
    fakes = FakeEngine(
        changed_capacity(FAKE_CAPACITY, **capacity),
        SchedulerSettings(**{"adapter_aging_seconds": AGING_NS / 1e9, **(settings or {})}),
        adapter_host_bytes=host_bytes,
        num_polls=num_polls,
        copy_steps=copy_steps,
    )
    for digest in ("a", "b", "c", "d"):
        fakes.register(digest)
    if capacity["num_adapter_pages"] > 1:
        fakes.register("wide", num_pages=2)
    return fakes


def test_a_cold_adapter_delays_its_own_request_only():
    fakes = fake_engine(num_polls=4, copy_steps=3)
    cold = fakes.add([1, 2, 3], "a")
    warm = fakes.add([1, 2, 3], max_tokens=20)
    fakes.step()
    assert fakes.records[0].request_ids == (warm,)
    fakes.step(3)
    assert fakes.tokens(cold) == []
    assert len(fakes.tokens(warm)) == 4
    fakes.run()
    for request_id in (cold, warm):
        assert fakes.tokens(request_id) == fakes.alone(request_id)
    timing = fakes.completions[cold].outputs[-1].timing
    assert timing.arrival_ns < timing.adapter_ready_ns <= timing.first_scheduled_ns


def test_a_plan_may_only_start_a_copy():
    fakes = fake_engine(copy_steps=1)
    fakes.add([1], "a", max_tokens=1)
    fakes.step(2)
    assert fakes.runner.plans[0].rows == ()
    assert len(fakes.runner.plans[0].adapter_copies) == 1
    fakes.run()


def test_an_adapter_on_the_device_is_used_at_once():
    fakes = fake_engine()
    fakes.add([1], "a", max_tokens=1)
    fakes.run()
    hit = fakes.add([2], "a", max_tokens=1)
    fakes.step()
    assert fakes.tokens(hit) == fakes.alone(hit)
    stats = fakes.engine.stats().adapters
    assert (stats.device_hits, stats.device_misses, stats.loads) == (1, 1, 1)


def test_the_same_adapter_twice_counts_once():
    fakes = fake_engine(num_adapter_pages=2)
    request_id = fakes.add([1], "wide", "wide", max_tokens=2)
    fakes.run()
    assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_more_than_ever_fits_together_is_refused():
    fakes = fake_engine()
    request_id = fakes.add([1], "wide", "a")
    fakes.run()
    assert fakes.completions[request_id].error_code == "adapter_too_large"


@pytest.mark.parametrize("host_bytes", [100, 200, 1000])
@pytest.mark.parametrize("keeps_host_copy", [False, True])
def test_two_adapters_of_one_request_meet_on_a_small_host(host_bytes, keeps_host_copy):
    fakes = fake_engine(host_bytes=host_bytes, keeps_host_copy=keeps_host_copy)
    requests = [fakes.add([1], *pair, max_tokens=2) for pair in ("ab", "cd", "ba", "ac", "d", "b")]
    fakes.run(200)
    for request_id in requests:
        assert fakes.tokens(request_id) == fakes.alone(request_id)


@pytest.mark.parametrize("policy", list(BatchSchedulerPolicy))
def test_pages_are_counted_once_per_adapter_and_step(policy):
    """Four sequences with one adapter need its page once; the base model needs none."""
    fakes = fake_engine(
        settings={"batch_scheduler_policy": policy}, num_adapter_pages=1, max_num_seqs=5
    )
    sharing = [fakes.add([n], "a", max_tokens=4) for n in range(4)]
    base = fakes.add([1], max_tokens=12)
    other = fakes.add([1], "b", max_tokens=1)
    fakes.run()
    assert any({*sharing, base} <= {*record.request_ids} for record in fakes.records)
    assert fakes.engine.stats().adapters.copies == 2
    assert fakes.tokens(other) == fakes.alone(other)
    assert fakes.engine.stats().preemptions == 0


def test_adapters_of_one_request_do_not_evict_each_other_from_the_host():
    """The host holds one of the two, and the pages of the first are not free yet."""
    fakes = fake_engine(host_bytes=100, keeps_host_copy=False, num_adapter_pages=2)
    fakes.add([1], "c", max_tokens=40)
    fakes.step(4)
    fakes.add([1], "d", max_tokens=40)
    fakes.step(4)
    both = fakes.add([1], "a", "b", max_tokens=1)
    fakes.step(10)
    assert fakes.loader.num_loads == 3
    fakes.run()
    assert fakes.tokens(both) == fakes.alone(both)
    assert fakes.loader.num_loads == 4


def test_an_adapter_does_not_evict_its_companion():
    fakes = fake_engine(max_num_seqs=1)
    fakes.add([1], max_tokens=60)
    for digest in ("a", "c"):
        fakes.add([1], digest, max_tokens=1)
        fakes.step(4)
    both = fakes.add([1], "a", "b", max_tokens=1, priority=-1)
    fakes.step(6)
    assert fakes.engine.stats().adapters.device_evictions == 1
    fakes.run()
    assert fakes.tokens(both) == fakes.alone(both)


def test_a_pinned_adapter_stays():
    fakes = fake_engine(num_adapter_pages=1)
    running = fakes.add([1], "a", max_tokens=30)
    fakes.step(4)
    waiting = fakes.add([1], "b", max_tokens=1)
    fakes.step(10)
    assert fakes.tokens(waiting) == []
    fakes.run()
    assert fakes.tokens(running) == fakes.alone(running)
    assert fakes.tokens(waiting) == fakes.alone(waiting)


def test_a_failed_load_fails_those_that_wait_and_is_tried_again_later():
    fakes = fake_engine(num_polls=3)
    fakes.loader.fail("a")
    failed = [fakes.add([1], "a"), fakes.add([2], "a", "b")]
    other = fakes.add([1], "c")
    fakes.run()
    for request_id in failed:
        assert fakes.completions[request_id].error_code == "adapter_load_failed"
        assert re.search(
            naming("/staged/a"), fakes.completions[request_id].outputs[-1].error.message
        )
    assert fakes.tokens(other) == fakes.alone(other)
    too_soon = fakes.add([1], "a")
    fakes.run()
    error = fakes.completions[too_soon].outputs[-1].error
    assert error.code == "adapter_load_failed"
    assert 0 < error.retry_after_seconds <= 1.0
    fakes.clock.advance_seconds(error.retry_after_seconds)
    again = fakes.add([1], "a")
    fakes.run()
    assert fakes.tokens(again) == fakes.alone(again)


def test_a_failed_copy_fails_those_that_wait():
    fakes = fake_engine()
    fakes.runner.fail_copies()
    request_id = fakes.add([1], "a")
    fakes.run()
    assert fakes.completions[request_id].error_code == "adapter_load_failed"
    assert "the copy failed" in fakes.completions[request_id].outputs[-1].error.message


def stream(fakes, num_steps, *digests, stop_when, max_tokens=6):
    """A new request of the given adapters, in turn, with every step; steps until the condition."""
    for step in range(num_steps):
        fakes.add([1], digests[step % len(digests)], max_tokens=max_tokens)
        fakes.step()
        if stop_when():
            return step
    return None


def is_scheduled(fakes, request_id):
    return any(request_id in record.request_ids for record in fakes.records)


@pytest.mark.parametrize("fair_share", list(FairShare))
@pytest.mark.parametrize("digests", [("a", "b"), ("a",)])
def test_a_request_that_lacks_pages_is_not_passed_over_for_ever(digests, fair_share):
    """The bound: twice the aging time, then the rows that run (6 tokens) and its own load."""
    fakes = fake_engine(max_num_seqs=16, settings={"fair_share": fair_share})
    for digest in digests:
        fakes.add([1], digest, max_tokens=6)
    fakes.step(3)
    wide = fakes.add([1], "wide", max_tokens=1)
    num_steps = stream(fakes, 200, *digests, stop_when=lambda: is_scheduled(fakes, wide))
    assert num_steps is not None, "it starves"
    aging_steps = AGING_NS // MILLISECOND_NS
    assert aging_steps // 2 < num_steps <= 2 * aging_steps + 6 + 6
    fakes.run()


@pytest.mark.parametrize("fair_share", list(FairShare))
def test_newcomers_do_not_keep_a_request_from_its_pages(fair_share):
    """Each brings a new adapter: a share that was served nothing so far."""
    fakes = fake_engine(max_num_seqs=16, settings={"fair_share": fair_share})
    newcomers = [f"new {number}" for number in range(200)]
    for digest in newcomers:
        fakes.register(digest)
    for digest in ("wide", *newcomers[:2]):
        fakes.add([1], digest, max_tokens=6)
        fakes.step(3)
    wide = fakes.add([2], "wide", max_tokens=1)
    num_steps = stream(
        fakes, 198, *newcomers[2:], stop_when=lambda: is_scheduled(fakes, wide), max_tokens=6
    )
    assert num_steps is not None, "it starves"
    assert num_steps <= 2 * (AGING_NS // MILLISECOND_NS) + 6 + 6
    fakes.run(3000)


def test_at_first_only_new_adapters_are_held_up():
    """One page is pinned by `a`; the other drains, because no unpinned adapter is let in."""
    fakes = fake_engine(num_adapter_pages=3, max_num_seqs=16)
    fakes.add([1], "a", max_tokens=200)
    fakes.step(3)
    fakes.add([1], "b", max_tokens=4)
    fakes.add([1], "c", max_tokens=4)
    fakes.step(3)
    wide = fakes.add([1], "wide", max_tokens=1)
    digests = ("b", "c", "d", "a")
    num_steps = stream(
        fakes, 200, *digests, stop_when=lambda: is_scheduled(fakes, wide), max_tokens=3
    )
    assert num_steps is not None
    assert num_steps <= AGING_NS // MILLISECOND_NS + 10
    fakes.run(3000)


def test_the_base_model_is_never_held_up():
    fakes = fake_engine(num_adapter_pages=2, max_num_seqs=4)
    fakes.add([1], "a", max_tokens=200)
    fakes.step(3)
    wide = fakes.add([1], "wide", max_tokens=1)
    fakes.step(3 * AGING_NS // MILLISECOND_NS)
    base = fakes.add([1], max_tokens=1)
    held_up = fakes.add([1], "b", max_tokens=1)
    fakes.step(3)
    assert fakes.tokens(base) == fakes.alone(base)
    assert not is_scheduled(fakes, held_up)
    fakes.run()
    for request_id in (wide, held_up):
        assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_running_requests_are_not_preempted_for_adapters():
    fakes = fake_engine(num_adapter_pages=1)
    fakes.add([1], "a", max_tokens=100)
    fakes.step(3)
    fakes.add([1], "b", max_tokens=1)
    fakes.run()
    assert fakes.engine.stats().preemptions == 0


@pytest.fixture
def visits(monkeypatch):
    """Requests that plans looked at, in their order."""
    visited = []

    def visit(self, request):
        visited.append(request.request_id)
        return original(self, request)

    original = AdapterScan.visit
    monkeypatch.setattr(AdapterScan, "visit", visit)
    return visited


def test_a_plan_looks_at_a_limited_number_of_the_adapters_that_wait(visits):
    """2,000 adapters wait for pages while slots are free."""
    fakes = fake_engine(max_num_seqs=8)
    running = [fakes.add([1], digest, max_tokens=1000) for digest in "ab"]
    fakes.step(4)
    for number in range(2000):
        fakes.register(f"cold {number}")
        fakes.add([1], f"cold {number}", max_tokens=1)
    visits.clear()
    fakes.step(10)
    assert len(visits) <= 10 * MAX_PREFETCHED_QUEUES
    late = [fakes.add([2], digest, max_tokens=2) for digest in ("a", "b")]
    base = fakes.add([2], max_tokens=2)
    visits.clear()
    fakes.step()
    assert all(is_scheduled(fakes, request_id) for request_id in (*late, base))
    assert len(visits) <= MAX_PREFETCHED_QUEUES + len(late) + 1
    fakes.engine.check()
    for request_id in running:
        fakes.engine.abort(request_id)
    visits.clear()
    fakes.step(100)
    assert len(visits) <= 100 * (MAX_PREFETCHED_QUEUES + 2)
    num_done = sum(completion.is_finished for completion in fakes.completions.values())
    assert num_done > 20, "the adapters that wait follow one after the other"


@pytest.mark.parametrize("num_wide", [MAX_PREFETCHED_QUEUES - 2, 40, 100])
def test_an_adapter_that_fits_does_not_wait_for_many_that_do_not(num_wide):
    """The bound: two plans, and one more for each MAX_LATER_QUEUES adapters that wait."""
    fakes = fake_engine(num_adapter_pages=3, settings={"adapter_aging_seconds": 10.0})
    fakes.add([1], "a", max_tokens=200)
    fakes.step(3)
    for number in range(num_wide):
        fakes.register(f"wide {number}", num_pages=3)
        fakes.add([1], f"wide {number}", max_tokens=1)
    small = fakes.add([1], "b", max_tokens=1)
    fakes.step(num_wide // MAX_LATER_QUEUES + 2 + NUM_STEPS_OF_LOAD)
    assert fakes.tokens(small) == fakes.alone(small)
    fakes.run(3000)


def test_many_that_fit_do_not_keep_the_memory_from_one_that_does_not():
    """The bound: twice the aging time, then the rows that run (6 tokens) and its own load."""
    fakes = fake_engine(num_adapter_pages=4, max_num_seqs=16)
    for digest in "ab":
        fakes.add([1], digest, max_tokens=6)
    fakes.step(3)
    fakes.register("widest", num_pages=4)
    wide = fakes.add([1], "widest", max_tokens=1)
    newcomers = [f"small {number}" for number in range(400)]
    for digest in newcomers:
        fakes.register(digest)
    for digest in newcomers[:200]:
        fakes.add([1], digest, max_tokens=6)
    num_steps = stream(
        fakes, 200, *newcomers[200:], stop_when=lambda: is_scheduled(fakes, wide), max_tokens=6
    )
    assert num_steps is not None, "it starves"
    assert num_steps <= 2 * (AGING_NS // MILLISECOND_NS) + 6 + 6
    fakes.run(5000)


@pytest.mark.parametrize("fair_resident_lead", [0.0, 2048.0])
def test_queues_follow_their_adapters_to_the_device_and_back(fair_resident_lead):
    fakes = fake_engine(num_adapter_pages=2, settings={"fair_resident_lead": fair_resident_lead})
    for step in range(60):
        fakes.add([step + 1], "abcd"[step * 7 % 4], max_tokens=1 + step % 3)
        fakes.step()
        fakes.engine.check()
    fakes.run()
    for request_id in fakes.requests:
        assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_preload_brings_an_adapter_to_the_device():
    fakes = fake_engine(copy_steps=1)
    fakes.engine.preload("a")
    assert fakes.engine.next_wake_ns() is None
    fakes.step()
    assert not fakes.engine.is_idle
    fakes.run()
    assert fakes.engine.stats().adapters.num_on_device == 1
    hit = fakes.add([1], "a", max_tokens=1)
    fakes.step()
    assert fakes.tokens(hit) == fakes.alone(hit)


def test_preload_takes_no_memory_that_a_request_needs():
    fakes = fake_engine(num_adapter_pages=1, max_num_seqs=1)
    fakes.add([1], max_tokens=30)
    wanted = fakes.add([1], "a", max_tokens=1)
    fakes.step(5)
    assert fakes.engine.stats().adapters.num_on_device == 1
    fakes.engine.preload("b")
    fakes.step(5)
    assert fakes.engine.stats().adapters.device_evictions == 0
    fakes.run()
    assert fakes.tokens(wanted) == fakes.alone(wanted)


def test_a_preload_evicts_no_idle_adapter():
    fakes = fake_engine(num_adapter_pages=1)
    fakes.add([1], "a", max_tokens=1)
    fakes.run()
    fakes.engine.preload("b")
    fakes.step(5)
    assert fakes.engine.stats().adapters.device_evictions == 0
    assert fakes.loader.num_loads == 1
    # It has ended: free pages later do not revive it.
    assert not fakes.engine._scheduler.adapters.is_preloading(fakes.engine._adapters.handle("b"))


def test_a_pinned_preload_evicts_an_idle_adapter():
    fakes = fake_engine(num_adapter_pages=3)
    fakes.add([1], "a", max_tokens=1)
    fakes.add([1], "b", max_tokens=1)
    fakes.add([1], "d", max_tokens=1)
    fakes.run()
    fakes.engine.pin_adapter("c")
    fakes.step()
    fakes.run()
    assert fakes.engine.stats().adapters.device_evictions == 1
    assert fakes.loader.num_loads == 4


def test_a_failed_preload_is_forgotten():
    fakes = fake_engine()
    fakes.loader.fail("a")
    fakes.engine.preload("a")
    fakes.step()
    fakes.run()
    fakes.clock.advance_seconds(100)
    fakes.step(3)
    assert fakes.loader.num_loads == 1


def test_waiting_for_a_slot_does_not_stop_the_load():
    fakes = fake_engine(max_num_seqs=1)
    fakes.add([1], max_tokens=20)
    fakes.add([1], "a", max_tokens=1)
    fakes.step(5)
    assert fakes.engine.stats().adapters.num_on_device == 1
    fakes.run()


def test_siblings_use_the_adapter_too():
    fakes = fake_engine()
    sampling = SamplingParams(max_tokens=3, n=3, seed=1)
    request_id = fakes.add(range(1, 40), "a", sampling=sampling)
    fakes.run()
    assert fakes.completions[request_id].token_ids == {
        i: fakes.alone(request_id, i) for i in range(3)
    }
