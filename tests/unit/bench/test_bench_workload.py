import collections
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.bench.arrivals import Burst, ClosedLoop, Poisson
from loraplex.bench.popularity import BaseOnly, Distinct, Identical, Uniform, Zipf
from loraplex.bench.workload import (
    Lengths,
    Workload,
    generate,
    parse_arrivals,
    parse_lengths,
    parse_popularity,
)
from loraplex.core.errors import ConfigError

VOCABULARY = range(100, 200)
POPULARITIES = st.sampled_from([BaseOnly(), Identical(), Uniform(), Distinct(), Zipf(1.5)])
ARRIVALS = st.sampled_from([Burst(), ClosedLoop(4), Poisson(2.0)])
LENGTHS = st.tuples(st.integers(1, 50), st.integers(0, 50)).map(
    lambda pair: Lengths(pair[0], pair[0] + pair[1])
)
WORKLOADS = st.builds(
    Workload,
    num_requests=st.integers(1, 30),
    prompt_tokens=LENGTHS,
    output_tokens=LENGTHS,
    popularity=POPULARITIES,
    num_adapters=st.integers(1, 8),
    arrivals=ARRIVALS,
    seed=st.integers(0, 2**32),
)


def adapters(workload: Workload, repeat: int = 1) -> list[int | None]:
    return [request.adapter for request in generate(workload, repeat, VOCABULARY)]


@given(WORKLOADS, st.integers(0, 3))
def test_requests_are_as_the_workload_says(workload, repeat):
    requests = generate(workload, repeat, VOCABULARY)
    assert requests == generate(workload, repeat, VOCABULARY)
    assert len(requests) == workload.num_requests
    for request in requests:
        assert (
            workload.prompt_tokens.low
            <= len(request.prompt_token_ids)
            <= workload.prompt_tokens.high
        )
        assert (
            workload.output_tokens.low <= request.num_output_tokens <= workload.output_tokens.high
        )
        assert set(request.prompt_token_ids) <= set(VOCABULARY)
        assert request.adapter is None or 0 <= request.adapter < workload.num_adapters
        assert request.due_seconds >= 0


def test_lengths_reach_both_ends(workload):
    requests = generate(workload(num_requests=200, prompt_tokens=Lengths(3, 5)), 0, VOCABULARY)
    assert {len(request.prompt_token_ids) for request in requests} == {3, 4, 5}


def test_popularities_differ_in_adapters_and_prompts_only(workload):
    changes = {"prompt_tokens": Lengths(8, 20), "output_tokens": Lengths(1, 9)}
    base, adapted = (
        generate(workload(popularity=popularity, arrivals=Poisson(3), **changes), 1, VOCABULARY)
        for popularity in (BaseOnly(), Distinct())
    )

    def shape(request):
        return len(request.prompt_token_ids), request.num_output_tokens, request.due_seconds

    assert list(map(shape, base)) == list(map(shape, adapted))
    assert not {r.prompt_token_ids for r in base} & {r.prompt_token_ids for r in adapted}


@pytest.mark.parametrize("change", [{"seed": 1}, {"arrivals": ClosedLoop(3)}, {"num_requests": 7}])
def test_no_two_runs_share_a_prompt(workload, change):
    runs = [(workload(), 0), (workload(), 1), (workload(**change), 0)]
    prompts = [
        {request.prompt_token_ids for request in generate(each, repeat, VOCABULARY)}
        for each, repeat in runs
    ]
    assert not any(one & other for one, other in itertools.combinations(prompts, 2))


def test_base_only_and_identical(workload):
    assert adapters(workload(popularity=BaseOnly())) == [None] * 6
    assert adapters(workload(popularity=Identical())) == [0] * 6


def test_distinct_is_in_turn(workload):
    assert adapters(workload(num_requests=7)) == [0, 1, 2, 0, 1, 2, 0]


def test_uniform_is_even(workload):
    counts = collections.Counter(adapters(workload(num_requests=4000, popularity=Uniform())))
    assert set(counts) == {0, 1, 2}
    assert all(1200 < count < 1467 for count in counts.values())


def test_zipf_falls_with_the_power_of_the_rank(workload):
    drawn = adapters(workload(num_requests=20_000, num_adapters=100, popularity=Zipf(1.0)))
    counts = collections.Counter(drawn)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.15)
    # 1 / (1 + 1/2 + ... + 1/100)
    assert counts[0] / 20_000 == pytest.approx(0.1928, rel=0.05)


def test_adapters_are_drawn_anew_in_each_repeat(workload):
    uniform = workload(num_requests=20, popularity=Uniform())
    assert adapters(uniform, 1) != adapters(uniform, 2)


def test_poisson_has_its_rate_and_its_spread(workload):
    poisson = workload(num_requests=4000, arrivals=Poisson(50.0))
    due = [request.due_seconds for request in generate(poisson, 0, VOCABULARY)]
    gaps = [after - before for before, after in itertools.pairwise([0.0, *due])]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # Of an exponential distribution the standard deviation is the mean.
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize("arrivals", [Burst(), ClosedLoop(2)])
def test_without_a_rate_everything_is_due_at_once(workload, arrivals):
    requests = generate(workload(arrivals=arrivals), 0, VOCABULARY)
    assert {request.due_seconds for request in requests} == {0.0}


@given(WORKLOADS)
def test_a_workload_survives_json(workload):
    assert msgspec.json.decode(msgspec.json.encode(workload), type=Workload) == workload


@pytest.mark.parametrize("popularity", [Identical(), Uniform(), Distinct(), Zipf(1.25)])
def test_a_popularity_is_read_as_it_is_written(popularity):
    assert parse_popularity(str(popularity)) == popularity


@pytest.mark.parametrize("arrivals", [Burst(), ClosedLoop(8), Poisson(2.5)])
def test_arrivals_are_read_as_they_are_written(arrivals):
    assert parse_arrivals(str(arrivals)) == arrivals


@pytest.mark.parametrize("text", ["32", "16-64"])
def test_lengths_are_read_as_they_are_written(text):
    assert str(parse_lengths(text)) == text


@pytest.mark.parametrize("text", ["", "base", "zipf", "zipf:", "zipf:0", "zipf:nan", "uniform:2"])
def test_a_bad_popularity_is_named(text):
    with pytest.raises(ConfigError, match="popularity"):
        parse_popularity(text)


@pytest.mark.parametrize("text", ["", "closed", "closed:0", "closed:2.5", "poisson:-1", "burst:3"])
def test_a_bad_load_is_named(text):
    with pytest.raises(ConfigError, match="load"):
        parse_arrivals(text)


@pytest.mark.parametrize("text", ["", "0", "-5", "8-", "9-8", "many"])
def test_a_bad_length_is_named(text):
    with pytest.raises(ConfigError, match="length"):
        parse_lengths(text)
