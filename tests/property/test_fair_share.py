"""Fair shares over random arrivals: a request is overtaken by a bounded number of tokens."""

import dataclasses
import random

import hypothesis.strategies as st
from hypothesis import given

from loraplex.core.scheduler_settings import FairShare
from loraplex.scheduling.fair_share import FairShares
from loraplex.scheduling.queues import WaitingQueue
from loraplex.scheduling.request import Request, Sequence, StopRules
from support.engine_requests import engine_request
from support.examples import examples

MAX_COST = 50
MAX_SHARES = 12


@dataclasses.dataclass
class Server:
    """Admits one sequence after the other, in order; each is served at once, and ends."""

    draw: random.Random

    def __post_init__(self):
        self.shares = FairShares(FairShare.ADAPTER, 1.0, 2.0)
        self.queue = WaitingQueue(self.shares.counter)
        self.num_requests = 0
        self.max_weight = 0.0
        self.max_active = 0
        self.active: dict[tuple[int, ...], int] = {}

    def weight(self, share):
        return (0.5, 1.0, 1.0, 4.0)[share % 4]

    def add(self, share: int) -> Sequence:
        self.num_requests += 1
        request = engine_request(
            (1,),
            request_id=self.num_requests,
            tenant="us",
            arrival_ns=self.num_requests,
            share_weight=self.weight(share),
        )
        owner = Request(request, ((share, 1.0),), StopRules(request, 100))
        owner.share = self.shares.key(request, owner.handles)
        sequence = Sequence(owner, self.num_requests, 0, [1], 1, seed=0)
        self.shares.enter(owner.share, self.weight(share), self.queue.by_share)
        self.active[owner.share] = self.active.get(owner.share, 0) + 1
        self.queue.add(sequence)
        weights = sum(self.weight(share) for (share,) in self.active)
        self.max_weight = max(self.max_weight, weights)
        self.max_active = max(self.max_active, len(self.active))
        return sequence

    def admit(self, sequence: Sequence) -> int:
        """Return its cost."""
        share, cost = sequence.request.share, self.draw.randint(1, MAX_COST)
        self.queue.remove(sequence)
        self.shares.charge(share, cost, 0)
        self.shares.leave(share)
        self.active[share] -= 1
        if not self.active[share]:
            del self.active[share]
        self.check()
        return cost

    def first(self) -> Sequence:
        return self.queue.scan().next().head

    def check(self):
        self.queue.check()
        self.shares.check(self.active)


@given(
    seed=st.integers(0, 10**9),
    num_shares=st.integers(1, 8),
    num_before=st.integers(0, 60),
    newcomer_rate=st.sampled_from([0.0, 0.5, 1.0]),
    goes_on=st.booleans(),
)
@examples(1.5)
def test_overtaking_is_bounded(seed, num_shares, num_before, newcomer_rate, goes_on):
    """docs/invariants.md: at most 2 * S * W + (A + 1) * C.

    S: how far the counter of x is above the smallest when x becomes the head of its queue; W and A:
    weight and number of the shares that have requests; C: the dearest admission.
    """
    draw = random.Random(seed)
    server = Server(draw)
    for _ in range(num_before):
        server.add(draw.randrange(num_shares))
        if draw.random() < 0.7:  # a request whose adapter happens to be on the device
            server.admit(draw.choice(list(server.queue)))
    share = draw.randrange(num_shares)
    while any(sequence.request.share == (share,) for sequence in server.queue):
        server.admit(server.first())
    x = server.add(share)
    counter = server.shares.counter(x.request.share)
    spread = counter - min(server.shares.counter(share) for share in server.queue.by_share)
    spread = max(spread, counter - server.shares.virtual_time)
    server.max_weight = sum(server.weight(share) for (share,) in server.active)
    server.max_active = len(server.active)
    passed, newcomer = 0, 100
    while (first := server.first()) is not x:
        passed += server.admit(first)
        if len(server.active) < MAX_SHARES and draw.random() < newcomer_rate:
            newcomer += 1
            server.add(newcomer if draw.random() < 0.8 else draw.randrange(num_shares))
        if goes_on and first.request.share not in server.queue.by_share:
            server.add(first.request.share[0])
        bound = 2 * spread * server.max_weight + (server.max_active + 1) * MAX_COST
        assert passed <= bound + 1e-6 * bound


@given(seed=st.integers(0, 10**9), num_shares=st.integers(2, 6))
def test_backlogged_shares_are_served_alike(seed, num_shares):
    """Counters of backlogged shares differ by at most one admission (VTC, theorem 4.4)."""
    draw = random.Random(seed)
    server = Server(draw)
    for share in range(num_shares):
        server.add(share)
    for _ in range(200):
        first = server.first()
        server.add(first.request.share[0])
        server.admit(first)
        counters = [server.shares.counter((share,)) for share in range(num_shares)]
        dearest = MAX_COST / min(server.weight(share) for share in range(num_shares))
        assert max(counters) - min(counters) <= dearest
