"""Shares are served alike: counters, the virtual time, and what a flood does to the others."""

import dataclasses

import pytest

from loraplex.core.scheduler_settings import FairShare, SchedulerSettings
from loraplex.scheduling.fair_share import FairShares
from support.capacities import changed_capacity
from support.engine_requests import engine_request
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY


def shares_of(kind=FairShare.ADAPTER):
    return FairShares(kind, input_weight=1.0, output_weight=2.0)


def request_of(tenant):
    return engine_request((1,), tenant=tenant)


class CountedShares(list):
    """Waiting shares, with the number of times that all were looked at."""

    num_reads = 0

    def __iter__(self):
        self.num_reads += 1
        return super().__iter__()


def test_the_shares_that_wait_are_looked_at_once_for_all_newcomers_of_a_step():
    shares, waiting = shares_of(), CountedShares()
    for step in range(3):
        for number in range(100):
            shares.enter((step, number), 1.0, waiting)
            waiting.append((step, number))
        shares.charge((step, 0), 10, 0)
    assert waiting.num_reads <= 3


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (FairShare.NONE, ()),
        (FairShare.ADAPTER, (3, 5)),
        (FairShare.TENANT, ("us",)),
        (FairShare.TENANT_ADAPTER, ("us", 3, 5)),
    ],
)
def test_what_shares_distinguish(kind, key):
    assert shares_of(kind).key(request_of("us"), (3, 5)) == key


def test_a_counter_is_weighted_tokens_by_weight():
    shares = shares_of()
    shares.enter((1,), 4.0, ())
    shares.charge((1,), num_input=10, num_output=3)
    assert shares.counter((1,)) == (10 + 2 * 3) / 4
    shares.check({(1,): 1})


def test_nothing_is_counted_where_nothing_is_shared():
    shares = shares_of(FairShare.NONE)
    shares.enter((), 1.0, ())
    shares.charge((), 10, 10)
    assert shares.counter(()) == 0.0
    shares.leave(())


def test_idling_earns_nothing():
    shares = shares_of()
    shares.enter((1,), 1.0, ())
    shares.charge((1,), 100, 0)
    shares.enter((2,), 1.0, [(1,)])
    assert shares.counter((2,)) == 100.0


def test_a_new_share_is_not_put_after_all_that_wait():
    shares = shares_of()
    for key in ((1,), (2,)):
        shares.enter(key, 1.0, ())
    shares.charge((1,), 1000, 0)
    shares.leave((1,))
    shares.enter((3,), 1.0, [(2,)])
    assert shares.counter((3,)) <= shares.counter((2,))


def test_what_was_served_ahead_is_remembered():
    shares = shares_of()
    for key in ((1,), (2,)):
        shares.enter(key, 1.0, ())
    shares.charge((1,), 1000, 0)
    shares.leave((1,))
    shares.enter((1,), 1.0, [(2,)])
    assert shares.counter((1,)) == 1000.0


def test_newcomers_do_not_overtake_for_ever():
    """Each newcomer is a new share that is served at once: the virtual time still passes (1,)."""
    shares = shares_of()
    for key in ((1,), (2,)):
        shares.enter(key, 1.0, ())
    shares.charge((1,), 300, 0)
    for number in range(10, 1000):
        newcomer = (number,)
        shares.enter(newcomer, 1.0, [(1,), (2,)])
        if shares.counter(newcomer) >= shares.counter((1,)):
            break
        shares.charge(newcomer, 10, 0)
        shares.leave(newcomer)
    # It grows by 10 / 3 with each; (2,) waits with 0.
    assert number - 10 <= 300 / (10 / 3) + 1


def test_stale_shares_are_forgotten():
    shares = shares_of()
    shares.enter((0,), 1.0, ())
    for number in range(1, 1000):
        shares.enter((number,), 1.0, ())
        shares.charge((number,), 1, 0)
        shares.charge((0,), 5, 0)
        shares.leave((number,))
    assert len(shares) < 200


# ---- through the engine ------------------------------------------------------------------------

NUM_SLOTS = 4
FLOOD_TOKENS = 8
NUM_FLOOD = 500


def fake_engine(fair_share, **values):
    settings = {"max_num_batched_tokens": 64, **values.pop("settings", {})}
    capacity = {"max_num_seqs": NUM_SLOTS, "num_adapter_pages": 8, "num_blocks": 512, **values}
    fakes = FakeEngine(
        changed_capacity(FAKE_CAPACITY, **capacity),
        SchedulerSettings(fair_share=fair_share, **settings),
    )
    for digest in ("flood", "quiet", "c", "d", "e", "f"):
        fakes.register(digest)
    return fakes


@dataclasses.dataclass
class Quiet:
    """One request now and then, however the others fare, and its steps to the first token."""

    fakes: FakeEngine
    every: int = 12
    request_ids: list[int] = dataclasses.field(default_factory=list)

    def run(self, num_requests, *digests, **values):
        for number in range(num_requests):
            prompt = [number % 90, 1, 2]
            self.request_ids.append(self.fakes.add(prompt, *digests, max_tokens=4, **values))
            self.fakes.step(self.every)

    @property
    def p99(self):
        completions = [self.fakes.completions[request_id] for request_id in self.request_ids]
        timings = [completion.outputs[-1].timing for completion in completions]
        waits = sorted(t.first_token_ns - t.arrival_ns for t in timings)
        return 1 + waits[int(0.99 * (len(waits) - 1))] // self.fakes.step_ns


def warm(fakes, *digests):
    for digest in digests:
        fakes.add([1], digest, max_tokens=1)
    fakes.run()


def p99_beside_flood(fair_share, *, num_flood=NUM_FLOOD):
    """p99 of a quiet adapter's steps to the first token, during a flood on another one."""
    fakes = fake_engine(fair_share)
    warm(fakes, "flood", "quiet")
    for number in range(num_flood):
        fakes.add([number % 97, number // 97, 3, 4], "flood", max_tokens=FLOOD_TOKENS)
    fakes.step(2)
    quiet = Quiet(fakes)
    quiet.run(40, "quiet")
    fakes.run(5000)
    return quiet.p99


FLOOD_BOUND = FLOOD_TOKENS
"""Maximum number of steps by which a flood raises the p99: until one of its sequences ends."""


def test_a_flood_on_one_adapter_raises_the_p99_of_a_quiet_one_by_a_bound():
    alone = p99_beside_flood(FairShare.ADAPTER, num_flood=0)
    assert alone == 1
    assert p99_beside_flood(FairShare.ADAPTER) - alone <= FLOOD_BOUND


def test_first_come_first_served_breaks_the_bound():
    assert p99_beside_flood(FairShare.NONE) - 1 > 10 * FLOOD_BOUND


def test_tenants_that_use_one_adapter_have_their_shares():
    waits = {}
    for fair_share in (FairShare.TENANT, FairShare.TENANT_ADAPTER, FairShare.ADAPTER):
        fakes = fake_engine(fair_share)
        warm(fakes, "flood")
        for number in range(100):
            fakes.add([number, 2], "flood", max_tokens=FLOOD_TOKENS, tenant="them")
        fakes.step(2)
        quiet = Quiet(fakes)
        quiet.run(10, "flood", tenant="us")
        fakes.run(3000)
        waits[fair_share] = quiet.p99
    assert waits[FairShare.TENANT] - 1 <= FLOOD_BOUND
    assert waits[FairShare.TENANT_ADAPTER] - 1 <= FLOOD_BOUND
    assert waits[FairShare.ADAPTER] > 2 * FLOOD_BOUND


def test_a_tenant_cannot_take_more_by_many_adapters():
    fakes = fake_engine(FairShare.TENANT)
    warm(fakes, "flood", "c", "d", "e", "f")
    for number in range(100):
        fakes.add([number, 2], "cdef"[number % 4], max_tokens=FLOOD_TOKENS, tenant="them")
    fakes.step(2)
    quiet = Quiet(fakes)
    quiet.run(10, "flood", tenant="us")
    fakes.run(3000)
    assert quiet.p99 - 1 <= FLOOD_BOUND


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_share_gets_tokens_by_its_weight(weight):
    """Both have enough waiting all the time: served tokens are as the weights."""
    fakes = fake_engine(FairShare.ADAPTER, num_blocks=2000)
    warm(fakes, "c", "d")
    light = {fakes.add([n, 1], "c", max_tokens=6) for n in range(300)}
    heavy = {fakes.add([n, 1], "d", max_tokens=6, share_weight=weight) for n in range(300)}
    fakes.step(300)
    served = [sum(len(fakes.tokens(r)) for r in requests) for requests in (light, heavy)]
    # They never differ by more than the slots hold: 2 + 2 * 6 each, at most half of them.
    one_batch = NUM_SLOTS * (2 + 2 * 6)
    assert abs(served[1] - weight * served[0]) <= (1 + weight) * one_batch
    fakes.run(5000)


def test_priority_comes_before_shares():
    fakes = fake_engine(FairShare.ADAPTER, max_num_seqs=1)
    warm(fakes, "c", "d")
    for _ in range(5):
        fakes.add([1], "c", max_tokens=9)
    fakes.step(2)
    quiet = fakes.add([1], "d", max_tokens=1, priority=1)
    urgent = fakes.add([1], "c", max_tokens=1, priority=-1)
    fakes.run()
    ends = [fakes.completions[r].outputs[-1].timing.first_token_ns for r in (urgent, 7, quiet)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("fair_share", [FairShare.ADAPTER, FairShare.NONE])
def test_requests_of_one_share_are_first_come_first_served(fair_share):
    fakes = fake_engine(fair_share)
    requests = [fakes.add([n], max_tokens=3 + n % 4) for n in range(20)]
    fakes.run()
    firsts = [fakes.completions[r].outputs[-1].timing.first_scheduled_ns for r in requests]
    assert firsts == sorted(firsts)


def test_what_the_prefix_cache_gave_is_not_counted():
    fakes = fake_engine(FairShare.ADAPTER, block_size=4)
    warm(fakes, "c")
    prompt = list(range(40))
    for _ in range(2):
        fakes.add(prompt, "c", max_tokens=1)
        fakes.run()
    shares = fakes.engine._scheduler._state.shares
    handle = fakes.register("c")
    # Computed and, twice, new: 40 and 1, then 40 - 36 and 1; in the warm-up 1 and 1.
    assert shares.counter((handle,)) == (40 + 2) + (4 + 2) + (1 + 2)
