"""Popularity, arrivals and the published generators."""

import collections
import statistics

import numpy as np
import pytest
from comparison.traces import PunicaTrace, SloraTrace

from loraplex.bench import arrivals, popularity
from loraplex.bench.arrivals import Gamma
from loraplex.bench.popularity import (
    Distinct,
    Geometric,
    Identical,
    PowerFunction,
    Shuffled,
    SquareRoot,
    geometric_sizes,
)
from loraplex.bench.workload import parse_arrivals, parse_popularity
from loraplex.core.errors import ConfigError

VOCABULARY = range(1000, 32000)


def counts(law, count: int, num_adapters: int) -> list[int]:
    drawn = collections.Counter(popularity.draw(law, count, num_adapters, "seed"))
    return sorted(drawn.values(), reverse=True)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1024, [291, 194, 157, 129, 86, 57, 38, 25, 17, 11, 7, 5, 3, 2, 1, 1]),
        (64, [17, 17, 11, 7, 5, 3, 2, 1, 1]),
        (32, [11, 7, 5, 3, 2, 2, 1, 1]),
        (1, [1]),
        (2, [1, 1]),
    ],
)
def test_punicas_skewed_sizes(count, sizes):
    assert geometric_sizes(count, 1.5) == sizes
    assert counts(Geometric(1.5), count, 1000) == sizes


def test_punicas_uniform_is_a_square_root():
    assert counts(SquareRoot(), 1024, 1000) == [32] * 32
    assert counts(SquareRoot(), 10, 1000) == [3, 3, 2, 2]


def test_shuffled_is_even_and_out_of_turn():
    drawn = popularity.draw(Shuffled(), 40, 20, "seed")
    assert sorted(drawn) == sorted([*range(20)] * 2)
    assert drawn != [*range(20)] * 2


@pytest.mark.parametrize(("alpha", "share"), [(1.0, 0.005), (0.3, 0.204), (0.1, 0.589)])
def test_the_power_functions_top_share(alpha, share):
    drawn = popularity.draw(PowerFunction(alpha), 20000, 200, "seed")
    assert drawn.count(0) / 20000 == pytest.approx(share, abs=0.01)
    assert max(drawn) < 200


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps(cv):
    due = arrivals.draw(Gamma(10.0, cv), 40000, "seed")
    gaps = [after - before for before, after in zip([0.0, *due], due, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


def test_the_new_laws_are_parsed():
    assert parse_popularity("powerfunc:0.3") == PowerFunction(0.3)
    assert parse_popularity("geometric:1.5") == Geometric(1.5)
    assert parse_popularity("shuffled") == Shuffled()
    assert parse_popularity("square-root") == SquareRoot()
    assert parse_arrivals("gamma:4,2") == Gamma(4.0, 2.0)
    for text in ("geometric:1", "powerfunc:", "powerfunc:-1"):
        with pytest.raises(ConfigError, match="popularity"):
            parse_popularity(text)
    for text in ("gamma:4", "gamma:4,0", "gamma:,1"):
        with pytest.raises(ConfigError, match="load"):
            parse_arrivals(text)


def test_s_loras_largest_trace_is_that_of_its_code():
    """Seen in a run of S-LoRA's generator: 1,200 requests touch 907 of 2,000 adapters."""
    trace = SloraTrace(num_adapters=2000, requests_per_second=10, seconds=120)
    requests = trace.generate(0, VOCABULARY)
    assert len(requests) == 1200
    assert len({request.adapter for request in requests}) == 907
    assert {len(request.prompt_token_ids) for request in requests} <= {*range(8, 512)}
    assert {request.num_output_tokens for request in requests} <= {*range(8, 512)}
    due = [request.due_seconds for request in requests]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(120, rel=0.1)
    assert trace.concurrency is None


def test_s_loras_draws_come_in_its_order():
    trace = SloraTrace(
        num_adapters=9,
        alpha=0.5,
        cv=2.0,
        requests_per_second=5,
        seconds=10,
        prompt_tokens=(8, 30),
        output_tokens=(4, 20),
    )
    legacy = np.random.RandomState(42)
    adapters = (legacy.power(0.5, 50) * 9).astype(int)
    prompts, outputs = legacy.randint(8, 30, 50), legacy.randint(4, 20, 50)
    due = np.cumsum(legacy.gamma(1 / 4, 4 / 5, 50))
    requests = trace.generate(0, VOCABULARY)
    assert [request.adapter for request in requests] == adapters.tolist()
    assert [len(request.prompt_token_ids) for request in requests] == prompts.tolist()
    assert [request.num_output_tokens for request in requests] == outputs.tolist()
    assert [request.due_seconds for request in requests] == pytest.approx(due.tolist())


def test_s_loras_prompts_share_no_beginning():
    trace = SloraTrace(num_adapters=5, requests_per_second=4, seconds=10, prompt_tokens=(8, 16))
    first, second = trace.generate(0, VOCABULARY), trace.generate(1, VOCABULARY)
    starts = [request.prompt_token_ids[:4] for request in (*first, *second)]
    assert len(set(starts)) == len(starts)
    assert [r.adapter for r in first] == [r.adapter for r in second]


def test_punicas_lengths():
    trace = PunicaTrace(popularity=Distinct(), num_adapters=32, num_requests=4000)
    requests = trace.generate(0, VOCABULARY)
    prompts = [len(request.prompt_token_ids) for request in requests]
    totals = [len(request.prompt_token_ids) + request.num_output_tokens for request in requests]
    assert min(prompts) >= 1
    assert statistics.median(prompts) == pytest.approx(17, abs=1)
    assert statistics.mean(totals) == pytest.approx(1024, rel=0.05)
    assert max(totals) < 2048
    assert all(request.num_output_tokens >= 2 for request in requests)
    assert {request.adapter for request in requests} == {*range(32)}


def test_punicas_identical():
    trace = PunicaTrace(popularity=Identical(), num_adapters=4, num_requests=9, max_model_len=64)
    assert [r.adapter for r in trace.generate(0, VOCABULARY)] == [0] * 9
