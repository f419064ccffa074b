import collections

import pytest

from loraplex.bench.arrivals import Burst, ClosedLoop, Poisson
from loraplex.bench.client import discover
from loraplex.bench.popularity import BaseOnly, Distinct, Identical
from loraplex.bench.session import run_suite
from loraplex.bench.settings import BenchSettings
from loraplex.bench.statistics import throughput_ratio
from loraplex.bench.workload import Lengths
from loraplex.core.errors import ConfigError, NotReadyError, QueueFullError
from support.naming import naming


class Log:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.done_runs: list[tuple[str, str]] = []

    def begin(self, num_runs: int) -> None:
        self.num_runs = num_runs

    def done(self, workload) -> None:
        self.done_runs.append((str(workload.arrivals), str(workload.popularity)))


def settings(**changes) -> BenchSettings:
    fields = {
        "loads": (ClosedLoop(1), Burst()),
        "popularities": (Identical(), Distinct()),
        "num_adapters": 3,
        "num_requests": 4,
        "prompt_tokens": Lengths(4, 4),
        "output_tokens": Lengths(3, 3),
        "repeats": 2,
        "seed": 0,
    }
    return BenchSettings(**(fields | changes))


async def run(url: str, wanted: BenchSettings):
    log = Log()
    results = await run_suite(await discover(url), wanted, log)
    return log, results


async def test_compared_runs_stand_side_by_side_and_change_places(url):
    log, _ = await run(url, settings())
    assert log.num_runs == len(log.done_runs) == 3 * 2 * 3
    passes = [log.done_runs[i : i + 6] for i in (0, 6, 12)]
    for one in passes:
        assert [load for load, _ in one] == ["closed:1"] * 3 + ["burst"] * 3
    orders = [[popularity for _, popularity in one[:3]] for one in passes]
    assert orders == [
        ["base", "identical", "distinct"],
        ["identical", "distinct", "base"],
        ["distinct", "base", "identical"],
    ]


async def test_the_first_pass_does_not_count(url):
    _, results = await run(url, settings())
    assert [(str(r.workload.arrivals), str(r.workload.popularity)) for r in results] == [
        (load, popularity)
        for load in ("closed:1", "burst")
        for popularity in ("base", "identical", "distinct")
    ]
    for result in results:
        assert len(result.runs) == 2
        assert result.median.num_requests == 8
        assert result.median.num_output_tokens == 24


async def test_the_ratio_is_to_the_base_model_under_the_same_load(url):
    _, results = await run(url, settings())
    for base, *adapted in (results[:3], results[3:]):
        assert base.workload.popularity == BaseOnly()
        assert base.throughput_ratio_to_base is None
        for result in adapted:
            ratio = throughput_ratio(result.runs, base.runs)
            assert result.throughput_ratio_to_base == ratio
            assert ratio is not None


async def test_every_adapter_is_warm_before_the_first_run(url, backend):
    await run(url, settings(popularities=(Identical(),)))
    first = [request.adapters[0].key.name for request in backend.requests[:3]]
    assert sorted(first) == ["a0", "a1", "a2"]
    later = collections.Counter(
        choice.key.name for request in backend.requests[3:] for choice in request.adapters
    )
    assert set(later) == {"a0"}


async def test_no_prompt_is_sent_twice(url, backend):
    await run(url, settings(prompt_tokens=Lengths(12, 12)))
    prompts = [request.prompt for request in backend.requests]
    assert len(set(prompts)) == len(prompts)


async def test_without_adapters_only_the_base_model_runs(url):
    _, results = await run(url, settings(num_adapters=0))
    assert [str(result.workload.popularity) for result in results] == ["base", "base"]


async def test_what_is_requested_twice_is_measured_once(url):
    wanted = settings(loads=(Burst(), Burst()), popularities=(Distinct(), Distinct()))
    _, results = await run(url, wanted)
    assert len(results) == 2


def test_the_number_of_requests_follows_the_concurrency():
    groups = settings(loads=(ClosedLoop(1), ClosedLoop(32), Poisson(5)), num_requests=None).groups()
    assert [group[0].num_requests for group in groups] == [8, 64, 8]


async def test_failures_are_reported_and_have_no_ratio(url, backend):
    wanted = settings(loads=(Burst(),), popularities=(Identical(),), repeats=1, num_adapters=0)
    for _ in range(8):
        backend.plant(QueueFullError("full"))
    _, [result] = await run(url, wanted)
    assert result.median.num_failed == 4
    assert "full" in result.median.errors[0]


async def test_more_adapters_than_served_are_refused(url, backend):
    with pytest.raises(ConfigError, match=naming(3, "echo", 4)):
        await run(url, settings(num_adapters=4))
    assert not backend.requests


async def test_lengths_beyond_the_model_are_refused(url):
    with pytest.raises(ConfigError, match=naming(5000, "echo", 4096)):
        await run(url, settings(prompt_tokens=Lengths(1, 4997)))


async def test_an_adapter_that_fails_to_warm_up_ends_it(url, backend):
    backend.plant(NotReadyError("still starting"))
    with pytest.raises(ConfigError, match=naming(503, "still starting")):
        await run(url, settings())
