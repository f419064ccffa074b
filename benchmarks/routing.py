"""Simulation of routing by adapter residency and load: no model, no Ray, simulated time.

    PYTHONPATH=src python benchmarks/routing.py [--write]

Requests arrive at random (Poisson) for adapters by Zipf's law with exponent 1. A replica has slots,
a queue, and one least-recently-used cache each for its device and its host. It reports once a
period, so the router decides by old residency. The times of a request are derived: prefill, then
one step for each token of a completion of random length; a load from disk or a copy to the device
comes first. Both routers get the same requests.
"""

import argparse
import bisect
import collections
import dataclasses
import heapq
import itertools
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path

from loraplex.deploy.routing import AdapterRouting, ReplicaReport, Residents

RESULT = Path(__file__).parent / "results" / "routing.md"
PREFILL_SECONDS, STEP_SECONDS, MEAN_TOKENS = 0.05, 0.02, 64
LOAD_SECONDS, COPY_SECONDS = 0.1, 0.005
REPORT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Case:
    title: str
    num_replicas: int
    num_adapters: int
    num_slots: int
    on_device: int
    """Adapters that the device of a replica holds."""
    on_host: int
    num_requests: int
    utilization: float
    """Requests that arrive, as a share of those that all slots can take."""


CASES = (
    Case("4 replicas, 200 adapters", 4, 200, 32, 64, 128, 40_000, 0.6),
    Case("64 replicas, 100,000 adapters", 64, 100_000, 32, 128, 1024, 200_000, 0.6),
)


@dataclasses.dataclass
class Request:
    arrival: float
    adapter: str
    seconds: float
    """Time in a slot, without that for its adapter."""


class Tier(collections.OrderedDict[str, None]):
    """The adapters of one tier, least recently used first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def use(self, adapter: str) -> None:
        self[adapter] = None
        self.move_to_end(adapter)
        if len(self) > self._size:
            self.popitem(last=False)


class Replica:
    def __init__(self, case: Case) -> None:
        self.num_slots = case.num_slots
        self.num_requests = 0
        self.waiting: collections.deque[Request] = collections.deque()
        self.device, self.host = Tier(case.on_device), Tier(case.on_host)

    def seconds(self, request: Request) -> float:
        """Return the time in a slot, and take the adapter into both tiers."""
        adapter, seconds = request.adapter, request.seconds
        if adapter not in self.device:
            seconds += COPY_SECONDS if adapter in self.host else LOAD_SECONDS
        self.device.use(adapter)
        self.host.use(adapter)
        return seconds

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            self.num_slots,
            self.num_requests,
            bytes(Residents.of(reversed(self.device))),
            bytes(Residents.of(reversed(self.host))),
        )


@dataclasses.dataclass
class Outcome:
    on_device: float
    """Share of requests whose replica had the adapter on its device when they arrived there."""
    on_host: float
    """The same on the device or the host."""
    waits: list[float]
    routing_seconds: list[float]


class Simulation:
    def __init__(self, case: Case, router: AdapterRouting | None) -> None:
        """Prepare a run. router: None routes at random."""
        self._router = router
        self._replicas = {f"replica-{i}": Replica(case) for i in range(case.num_replicas)}
        self._ends: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._draws = random.Random(2)
        self._waits: list[float] = []
        self._routing_seconds: list[float] = []

    def run(self, requests: Iterable[Request]) -> Outcome:
        hits, host_hits, total, next_report = 0, 0, 0, 0.0
        for request in requests:
            self._end_until(request.arrival)
            if self._router is not None and request.arrival >= next_report:
                next_report = request.arrival + REPORT_SECONDS
                for name, replica in self._replicas.items():
                    self._router.take_report(name, replica.report())
            name = self._choose(request.adapter)
            replica = self._replicas[name]
            total += 1
            hits += request.adapter in replica.device
            host_hits += request.adapter in replica.device or request.adapter in replica.host
            replica.num_requests += 1
            replica.waiting.append(request)
            self._begin(name, request.arrival)
        self._end_until(float("inf"))
        return Outcome(hits / total, host_hits / total, self._waits, self._routing_seconds)

    def _choose(self, adapter: str) -> str:
        if self._router is None:
            return self._draws.choice(list(self._replicas))
        # Ray's router knows the number of its own requests exactly, too.
        loads = {name: replica.num_requests for name, replica in self._replicas.items()}
        start = time.perf_counter()
        name = self._router.rank(adapter, loads)[0]
        self._router.note_sent(adapter, name)
        self._routing_seconds.append(time.perf_counter() - start)
        return name

    def _begin(self, name: str, now: float) -> None:
        replica = self._replicas[name]
        running = replica.num_requests - len(replica.waiting)
        if replica.waiting and running < replica.num_slots:
            request = replica.waiting.popleft()
            self._waits.append(now - request.arrival)
            end = now + replica.seconds(request)
            heapq.heappush(self._ends, (end, next(self._order), name))

    def _end_until(self, moment: float) -> None:
        while self._ends and self._ends[0][0] <= moment:
            now, _, name = heapq.heappop(self._ends)
            self._replicas[name].num_requests -= 1
            self._begin(name, now)


def requests_of(case: Case) -> list[Request]:
    draws = random.Random(1)
    weights = list(itertools.accumulate(1 / rank for rank in range(1, case.num_adapters + 1)))
    mean_seconds = PREFILL_SECONDS + MEAN_TOKENS * STEP_SECONDS
    rate = case.utilization * case.num_replicas * case.num_slots / mean_seconds
    now, made = 0.0, []
    for _ in range(case.num_requests):
        now += draws.expovariate(rate)
        rank = bisect.bisect_left(weights, draws.random() * weights[-1])
        seconds = PREFILL_SECONDS + draws.expovariate(1 / (MEAN_TOKENS * STEP_SECONDS))
        made.append(Request(now, f"adapter-{rank}", seconds))
    return made


def router_memory(case: Case, requests: Sequence[Request]) -> int:
    """Return the bytes of a router after the requests, by the reports of full replicas."""
    names = [f"replica-{i}" for i in range(case.num_replicas)]
    draws = random.Random(3)
    tracemalloc.start()
    router = AdapterRouting()
    for name in names:
        device = draws.sample(range(case.num_adapters), case.on_device)
        host = draws.sample(range(case.num_adapters), min(case.on_host, case.num_adapters))
        residents = (bytes(Residents.of(f"adapter-{i}" for i in tier)) for tier in (device, host))
        router.take_report(name, ReplicaReport(case.num_slots, 0, *residents))
    for request in requests:
        router.note_sent(request.adapter, draws.choice(names))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used


def rows(case: Case) -> Iterable[str]:
    requests = requests_of(case)
    routers = {"residency and load": AdapterRouting(), "random": None}
    for title, router in routers.items():
        outcome = Simulation(case, router).run(requests)
        cost, memory = "-", "-"
        if outcome.routing_seconds:
            cost = f"{1e6 * statistics.median(outcome.routing_seconds):.0f}"
            memory = f"{router_memory(case, requests) / 1e6:.2f}"
        waits = sorted(outcome.waits)
        yield (
            f"| {case.title} | {title} | {outcome.on_device:.1%} | {outcome.on_host:.1%} | "
            f"{1e3 * statistics.mean(waits):.0f} | {1e3 * waits[int(0.99 * len(waits))]:.0f} | "
            f"{cost} | {memory} |"
        )


def report(cases: Sequence[Case] = CASES) -> str:
    head = [
        "# Routing by adapter residency and load, against random routing",
        "",
        "Simulated with `benchmarks/routing.py`: "
        + "; ".join(
            f"{case.title}: {case.num_requests:,} requests, {case.num_slots} slots, "
            f"{case.on_device} adapters on a device and {case.on_host} on a host, "
            f"{case.utilization:.0%} of the slots in use"
            for case in cases
        )
        + f". Adapters by Zipf's law (exponent 1); reports every {REPORT_SECONDS:g} s.",
        "",
        "The share of requests whose replica had the adapter when they arrived includes the first "
        "request of each adapter.",
        "",
        "| case | router | on the device | on device or host | mean wait (ms) | 99 % wait (ms) "
        "| cost per request (us) | memory of the router (MB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *itertools.chain.from_iterable(map(rows, cases)), ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    text = report()
    if parser.parse_args().write:
        RESULT.write_text(text, encoding="utf-8")
    print(text)
