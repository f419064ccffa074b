import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.bench.statistics import (
    Percentiles,
    Ratio,
    RequestRecord,
    median_of_runs,
    percentile,
    percentiles,
    summarize,
    throughput_ratio,
)

MS = 1_000_000


def record(start_ms: int, chunk_ms: list[int], end_ms: int, tokens: int, **fields) -> RequestRecord:
    return RequestRecord(
        start_ns=start_ms * MS,
        chunk_ns=tuple(time * MS for time in chunk_ms),
        end_ns=end_ms * MS,
        num_prompt_tokens=10,
        num_output_tokens=tokens,
        **fields,
    )


def run(tokens_per_second: float, *, errors: tuple[str, ...] = (), ttft: float | None = 0.1):
    one = summarize([record(0, [1, 2], 1000, 2)], 0)
    return msgspec.structs.replace(
        one,
        output_tokens_per_second=tokens_per_second,
        num_failed=len(errors),
        errors=errors,
        time_to_first_token=None if ttft is None else Percentiles(ttft, 2 * ttft, 3 * ttft),
    )


def test_percentiles_of_known_values():
    values = [float(value) for value in range(101)]
    assert [percentile(values[::-1], p) for p in (0, 50, 90, 99, 100)] == [0, 50, 90, 99, 100]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([7.0], 99) == 7.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_percentiles_are_seconds():
    assert percentiles([2 * MS] * 5) == Percentiles(0.002, 0.002, 0.002)
    assert percentiles([]) is None


def test_the_figures_of_a_run():
    figures = summarize(
        [
            record(100, [120, 130, 140], 145, 3, num_cached_tokens=4),
            record(100, [140, 180], 200, 5),
        ],
        start_ns=0,
    )
    assert figures.duration_seconds == 0.2
    assert figures.requests_per_second == 10
    assert figures.output_tokens_per_second == 40
    assert (figures.num_prompt_tokens, figures.num_cached_tokens) == (20, 4)
    assert (figures.num_output_tokens, figures.num_chunks) == (8, 5)
    assert figures.time_to_first_token.p50 == pytest.approx(0.030)
    assert figures.inter_token_latency.p50 == pytest.approx(0.010)
    # 20 ms over 2 tokens, and 40 ms over 4: chunks may hold several.
    assert figures.time_per_output_token == Percentiles(0.010, 0.010, 0.010)
    assert figures.end_to_end.p50 == pytest.approx(0.0725)


def test_failed_requests_count_as_failures_only():
    good = record(0, [10, 20], 30, 2)
    bad = record(0, [1], 50, 1, error="status 429: full")
    figures = summarize([good, bad, bad], start_ns=0)
    assert (figures.num_requests, figures.num_failed) == (3, 2)
    assert figures.errors == ("status 429: full",)
    assert figures.requests_per_second == 1 / 0.05
    assert figures.num_output_tokens == 2
    assert figures.time_to_first_token.p50 == 0.010
    assert figures.end_to_end.p99 == 0.030


def test_a_run_that_failed_whole_has_no_latencies():
    figures = summarize([record(0, [], 50, 0, error="gone")], start_ns=0)
    assert figures.requests_per_second == 0
    assert figures.time_to_first_token is None
    assert figures.end_to_end is None


def test_one_token_has_no_time_between_tokens():
    figures = summarize([record(0, [10], 30, 1)], start_ns=0)
    assert figures.inter_token_latency is None
    assert figures.time_per_output_token is None
    assert figures.time_to_first_token.p50 == 0.010


def test_medians_over_repeats():
    middle = median_of_runs([run(10, ttft=0.1), run(1000, ttft=0.5), run(30, ttft=0.2)])
    assert middle.output_tokens_per_second == 30
    assert middle.time_to_first_token == Percentiles(0.2, 0.4, pytest.approx(0.6))
    assert middle.num_requests == 3
    assert middle.num_output_tokens == 6


def test_medians_leave_out_what_was_not_seen():
    assert median_of_runs([run(1, ttft=None), run(1, ttft=0.5)]).time_to_first_token.p50 == 0.5
    assert median_of_runs([run(1, ttft=None)]).time_to_first_token is None


def test_medians_keep_every_error():
    middle = median_of_runs([run(1, errors=("b",)), run(1), run(1, errors=("a", "b"))])
    assert (middle.num_failed, middle.errors) == (3, ("a", "b"))


def test_the_ratio_is_paired_by_repeat():
    runs, base_runs = [run(50), run(10), run(90)], [run(100), run(10), run(100)]
    assert throughput_ratio(runs, base_runs) == Ratio(0.9, 0.5, 1.0)


def test_no_ratio_of_runs_with_failures():
    assert throughput_ratio([run(50, errors=("full",))], [run(100)]) is None
    assert throughput_ratio([run(50)], [run(0, errors=("full",))]) is None
