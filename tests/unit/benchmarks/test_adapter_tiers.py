import dataclasses

import httpx
import pytest
from comparison.adapter_tiers import (
    AdapterUse,
    TierCounters,
    read_counters,
    reuse_distances,
    sum_counters,
)
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.errors import ConfigError
from loraplex.core.stats import AdapterTierStats, Durations, EngineStats
from loraplex.frontends.ops.metrics import metrics_app
from loraplex.serving.request_metrics import RequestMetrics

METRICS = """\
# TYPE loraplex_adapter_cache_lookups_total counter
loraplex_adapter_cache_lookups_total{model="m",result="hit"} 30.0
loraplex_adapter_cache_lookups_total{model="m",result="miss"} 10.0
# TYPE loraplex_adapter_host_lookups_total counter
loraplex_adapter_host_lookups_total{model="m",result="hit"} 4.0
loraplex_adapter_host_lookups_total{model="m",result="miss"} 6.0
# TYPE loraplex_adapter_loads_total counter
loraplex_adapter_loads_total{model="m"} 7.0
# TYPE loraplex_adapter_load_failures_total counter
loraplex_adapter_load_failures_total{model="m"} 1.0
# TYPE loraplex_adapter_copies_total counter
loraplex_adapter_copies_total{model="m"} 9.0
# TYPE loraplex_adapter_evictions_total counter
loraplex_adapter_evictions_total{model="m",tier="device"} 3.0
loraplex_adapter_evictions_total{model="m",tier="host"} 2.0
# TYPE loraplex_adapter_load_seconds histogram
loraplex_adapter_load_seconds_bucket{le="+Inf",model="m",stage="copy"} 9.0
loraplex_adapter_load_seconds_count{model="m",stage="copy"} 9.0
loraplex_adapter_load_seconds_sum{model="m",stage="copy"} 0.25
loraplex_adapter_load_seconds_bucket{le="+Inf",model="m",stage="read"} 7.0
loraplex_adapter_load_seconds_count{model="m",stage="read"} 7.0
loraplex_adapter_load_seconds_sum{model="m",stage="read"} 0.5
"""


@dataclasses.dataclass
class Cache:
    """Cache of limited capacity that evicts the longest idle; what is in use stays."""

    capacity: int
    in_use: list[int] = dataclasses.field(default_factory=list)
    idle: list[int] = dataclasses.field(default_factory=list)

    def start(self, adapter: int) -> bool:
        """Whether it is there."""
        is_hit = adapter in self.in_use or adapter in self.idle
        if adapter in self.idle:
            self.idle.remove(adapter)
        self.in_use.append(adapter)
        while len(set(self.in_use)) + len(self.idle) > self.capacity:
            self.idle.pop(0)
        return is_hit

    def end(self, adapter: int) -> None:
        self.in_use.remove(adapter)
        if adapter not in self.in_use:
            self.idle.append(adapter)


@st.composite
def closed_loops(draw: st.DrawFn) -> tuple[list[AdapterUse], int]:
    """(uses, clients): no more uses at once than clients, all moments different."""
    num_clients = draw(st.integers(1, 4))
    uses: list[AdapterUse] = []
    for client in range(num_clients):
        now = client
        for adapter in draw(st.lists(st.integers(0, 7), max_size=12)):
            end = now + num_clients * draw(st.integers(1, 5))
            uses.append(AdapterUse(adapter, now, end))
            now = end + num_clients * draw(st.integers(1, 5))
    return draw(st.permutations(uses)), num_clients


@given(closed_loops(), st.integers(0, 5))
def test_a_cache_has_what_is_near(loop, spare):
    uses, num_clients = loop
    cache = Cache(num_clients + spare)
    distances = reuse_distances(uses)
    moments = [(use.start_ns, index) for index, use in enumerate(uses)]
    ends = [(use.end_ns, ~index) for index, use in enumerate(uses)]
    for _, index in sorted([*moments, *ends]):
        if index < 0:
            cache.end(uses[~index].adapter)
        else:
            distance = distances[index]
            is_near = distance is not None and distance < cache.capacity
            assert cache.start(uses[index].adapter) == is_near


def test_distances_of_known_uses():
    uses = [
        AdapterUse(5, 0, 10),
        AdapterUse(6, 20, 30),
        AdapterUse(5, 40, 50),  # only 6 was used meanwhile
        AdapterUse(7, 60, 90),
        AdapterUse(7, 70, 80),  # it is in use
        AdapterUse(6, 85, 95),  # 5 was used since, and 7 is in use
        AdapterUse(7, 90, 99),  # without a gap
    ]
    assert reuse_distances(uses) == [None, None, 1, None, 0, 2, 0]
    assert reuse_distances([]) == []


def test_reads_the_counters():
    counters = read_counters(METRICS)
    assert (counters.device_hits, counters.device_misses) == (30, 10)
    assert (counters.host_hits, counters.host_misses) == (4, 6)
    assert (counters.loads, counters.load_failures, counters.copies) == (7, 1, 9)
    assert (counters.device_evictions, counters.host_evictions) == (3, 2)
    assert (counters.read_seconds, counters.copy_seconds) == (0.5, 0.25)
    assert counters.device_hit_rate == 0.75
    assert counters.host_hit_rate == 0.4


def test_a_counter_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"adapter_evictions_total.*'tier': 'host'"):
        read_counters(METRICS.replace('tier="host"', 'tier="other"'))


def test_between_two_moments_and_in_all():
    before = read_counters(METRICS)
    after = read_counters(METRICS.replace("} 30.0", "} 35.0").replace("} 7.0", "} 8.0"))
    between = after.since(before)
    assert (between.device_hits, between.loads, between.copies) == (5, 1, 0)
    assert between.host_hit_rate is None
    assert between.since(between).device_hit_rate is None
    assert sum_counters([before, between]) == after
    assert sum_counters([]) == between.since(between)


async def test_a_server_reports_them_all(backend):
    numbers = {
        "device_hits": 1,
        "device_misses": 2,
        "host_hits": 3,
        "host_misses": 4,
        "loads": 5,
        "load_failures": 6,
        "copies": 7,
        "device_evictions": 8,
        "host_evictions": 9,
    }
    times = {"read_times": Durations(total_ns=10**9), "copy_times": Durations(total_ns=5 * 10**8)}
    backend.engine_stats = EngineStats(adapters=AdapterTierStats(**numbers, **times))
    transport = httpx.ASGITransport(app=metrics_app(backend, RequestMetrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        text = (await http.get("/metrics")).text
    assert read_counters(text) == TierCounters(**numbers, read_seconds=1, copy_seconds=0.5)
