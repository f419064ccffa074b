"""Latencies in buckets, for percentiles of the time between two polls."""

import msgspec

from loraplex.frontends.ops.frontend_numbers import FrontendNumbers, encoded_families
from loraplex.frontends.ops.latencies import Latencies, LatencyBounds
from loraplex.serving.request_metrics import RequestMetrics


def test_each_time_is_in_the_bucket_below_its_bound():
    metrics = RequestMetrics()
    latencies = Latencies(metrics)
    assert not any(map(sum, msgspec.structs.astuple(latencies.by_model(["m"])["m"])))
    for seconds in (0.0005, 0.001, 0.03, 999.0):
        metrics.time_to_first_token.labels("m").observe(seconds)
    metrics.inter_token_latency.labels("other").observe(0.02)
    counts = latencies.by_model(["m", "other"])
    bounds = LatencyBounds()
    for kind in msgspec.structs.fields(LatencyBounds):
        of_kind = getattr(counts["m"], kind.name)
        assert len(of_kind) == len(getattr(bounds, kind.name)) + 1
    first_token = counts["m"].time_to_first_token
    assert (first_token[0], first_token[-1], sum(first_token)) == (2, 1, 4)
    assert first_token[bounds.time_to_first_token.index(0.04)] == 1
    assert sum(counts["m"].inter_token_latency) == sum(counts["m"].e2e_latency) == 0
    assert counts["other"].inter_token_latency[bounds.inter_token_latency.index(0.025)] == 1


async def test_other_processes_count_and_are_counted_once_for_many_viewers():
    now, collected = [0.0], []
    own, other = RequestMetrics(), RequestMetrics()
    numbers = FrontendNumbers(lambda: now[0])

    async def count():
        collected.append(now[0])
        return [encoded_families([other.registry])]

    numbers.count = count
    latencies = Latencies(own, numbers)
    own.e2e_latency.labels("m").observe(1.0)
    other.e2e_latency.labels("m").observe(1.0)
    for now[0] in (0.0, 0.1, 0.39, 0.5):
        await latencies.refresh()
        assert sum(latencies.by_model(["m"])["m"].e2e_latency) == 2
    assert collected == [0.0, 0.5]
    await numbers.refresh()
    assert collected == [0.0, 0.5, 0.5]
