"""Slots over random arrivals: no share keeps more than its part while another one waits."""

import dataclasses
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from loraplex.core.beam_search import BeamSearch
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import FairShare, SchedulerSettings
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.slot_claims import MAX_PLANS_WITHOUT_SLOT
from support.capacities import changed_capacity
from support.examples import examples
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY

MAX_STEPS = MAX_PLANS_WITHOUT_SLOT + 3
"""Steps in a row that may meet no claim: one more is planned ahead, one preempts, one computes.

With a pipeline others are computed until none is in flight.
"""
DIGESTS = "abcde"
TENANTS = ("us", "them", "others")


@dataclasses.dataclass
class Server:
    """An engine with all adapters on the device and blocks for all slots."""

    draw: random.Random
    fair_share: FairShare
    num_slots: int
    overlap: bool
    num_stages: int

    def __post_init__(self):
        capacity = {"block_size": 4, "num_blocks": 1000, "max_num_seqs": self.num_slots}
        self.max_steps = MAX_STEPS + self.num_stages - 1
        self.fakes = FakeEngine(
            changed_capacity(FAKE_CAPACITY, num_stages=self.num_stages, **capacity),
            SchedulerSettings(fair_share=self.fair_share, max_num_batched_tokens=64),
            overlap=self.overlap,
        )
        for digest in DIGESTS:
            self.fakes.register(digest)
            self.fakes.add([1], digest, max_tokens=1)
        self.fakes.run()
        self.num_without = 0

    def add(self, digest: str, tenant: str, max_tokens: int, n: int, beam_width: int = 0) -> int:
        sampling = SamplingParams(max_tokens=max_tokens, n=n, seed=1, ignore_eos=True)
        if beam_width:
            beam = BeamSearch(width=beam_width)
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, beam=beam)
        weight = 1.0 if self.fair_share is FairShare.TENANT_ADAPTER else 0.5 + TENANTS.index(tenant)
        prompt = [self.draw.randrange(9) for _ in range(self.draw.choice([1, 3, 20]))]
        return self.fakes.add(prompt, digest, sampling=sampling, tenant=tenant, share_weight=weight)

    def add_any(self):
        choice = self.draw.choice
        self.add(
            choice(DIGESTS),
            choice(TENANTS),
            max_tokens=choice([1, 5, 20, 60]),
            n=choice([1, 1, 2, self.num_slots]),
            beam_width=choice([0] * 7 + [2]),
        )

    def step(self):
        """Step, and check that claims are met in time."""
        before = set(self.state.running)
        self.fakes.step()
        self.fakes.engine.check()
        joined = [sequence for sequence in self.state.running if sequence not in before]
        is_met = any(self.num_missing(sequence.request.share) >= 0 for sequence in joined)
        can_be_met = self.has_claim() and self.has_surplus() and not self.state.slots.num_free
        self.num_without = self.num_without + 1 if can_be_met and not is_met else 0
        assert self.num_without <= self.max_steps

    @property
    def state(self):
        return self.fakes.engine._scheduler._state

    def num_missing(self, share) -> int:
        return self.state.shares.part(share, self.num_slots) - self.state.running.num_of(share)

    def has_claim(self) -> bool:
        queues = [queue for queue in self.state.waiting.queues if queue.is_ready]
        return any(q.head.request.num_slots <= self.num_missing(q.share) for q in queues)

    def has_surplus(self) -> bool:
        requests = [sequence.request for sequence in self.state.running]
        single = [request for request in requests if not isinstance(request, BeamRequest)]
        return any(self.num_missing(request.share) < 0 for request in single)

    def end(self):
        """Run to the end: every output is that of the request alone."""
        self.fakes.run(20_000)
        for request_id, request in self.fakes.requests.items():
            if request.sampling.beam is None:
                expected = {i: self.fakes.alone(request_id, i) for i in range(request.sampling.n)}
                assert self.fakes.completions[request_id].token_ids == expected


servers = st.builds(
    Server,
    draw=st.integers(0, 10**9).map(random.Random),
    fair_share=st.sampled_from([kind for kind in FairShare if kind is not FairShare.NONE]),
    num_slots=st.sampled_from([2, 3, 8]),
    overlap=st.booleans(),
    num_stages=st.sampled_from([1, 1, 3]),
)


@given(server=servers, num_requests=st.integers(1, 25), rate=st.sampled_from([0.2, 1.0]))
@examples(1)
def test_no_share_keeps_more_than_its_part_while_another_waits(server, num_requests, rate):
    while num_requests:
        if server.draw.random() < rate:
            num_requests -= 1
            server.add_any()
        server.step()
    for _ in range(60):
        server.step()
    server.end()


@given(server=servers, num_hostile=st.integers(1, 7), num_steps=st.integers(0, 20))
@examples(1)
def test_a_small_request_starts_in_a_few_steps(server, num_hostile, num_steps):
    """Other shares may have all slots, for as long as they like."""
    if server.fair_share is FairShare.TENANT:
        num_hostile = min(num_hostile, len(TENANTS) - 1)
    num_hostile = min(num_hostile, server.num_slots - 1, len(DIGESTS) - 1)
    for number in range(num_hostile):
        for _ in range(server.draw.randint(1, 3)):
            tenant = TENANTS[number % (len(TENANTS) - 1)]
            server.add(DIGESTS[number], tenant, max_tokens=500, n=server.num_slots)
        for _ in range(server.draw.randint(0, 3)):
            server.step()
    for _ in range(num_steps):
        server.step()
    small = server.fakes.add([1], DIGESTS[-1], max_tokens=1, tenant=TENANTS[-1])
    for _ in range(2 * server.max_steps):  # others may have their claims met first
        server.step()
        if server.fakes.completions[small].is_finished:
            return
    pytest.fail("the small request waits")
