"""Figures of a run from the records of its requests, and medians over repeats.

Latencies are in seconds. It knows no protocol: a client provides `RequestRecord`s.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as its client saw it. Times are nanoseconds of one monotonic clock."""

    start_ns: int
    """When it was due, or when the client of a closed loop was free to send it."""
    chunk_ns: tuple[int, ...] = ()
    """When each chunk with output arrived. A chunk may hold several tokens."""
    end_ns: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens from the server's prefix cache."""
    num_output_tokens: int = 0
    error: str | None = None
    """Why it failed; then its figures do not count."""


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of one latency in seconds."""

    p50: float
    p90: float
    p99: float


class RunStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. Failed requests count in `num_failed` and nowhere else.

    A latency is None where no request showed it.
    """

    num_requests: int
    num_failed: int
    errors: tuple[str, ...]
    """Errors of the failed requests, each text once."""
    duration_seconds: float
    """Duration from the start of the run to the end of its last request."""
    requests_per_second: float
    output_tokens_per_second: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_chunks: int
    time_to_first_token: Percentiles | None
    inter_token_latency: Percentiles | None
    """Time between successive chunks of one request."""
    time_per_output_token: Percentiles | None
    """Time from first to last chunk over all tokens but one: exact if chunks are merged."""
    end_to_end: Percentiles | None


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. `values` is not empty."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
    return below + (above - below) * (position - math.floor(position))


def percentiles(nanoseconds: Iterable[float]) -> Percentiles | None:
    """Return a latency's percentiles in seconds; None without values."""
    values = [value / 1e9 for value in nanoseconds]
    if not values:
        return None
    return Percentiles(*(percentile(values, percent) for percent in (50, 90, 99)))


def summarize(records: Sequence[RequestRecord], start_ns: int) -> RunStatistics:
    """The figures of a run that began at start_ns. `records` is not empty."""
    done = [record for record in records if record.error is None]
    streamed = [record for record in done if record.chunk_ns]
    duration = (max(record.end_ns for record in records) - start_ns) / 1e9
    num_output_tokens = sum(record.num_output_tokens for record in done)
    return RunStatistics(
        num_requests=len(records),
        num_failed=len(records) - len(done),
        errors=tuple(sorted({record.error for record in records if record.error is not None})),
        duration_seconds=duration,
        requests_per_second=len(done) / duration,
        output_tokens_per_second=num_output_tokens / duration,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in done),
        num_cached_tokens=sum(record.num_cached_tokens for record in done),
        num_output_tokens=num_output_tokens,
        num_chunks=sum(len(record.chunk_ns) for record in done),
        time_to_first_token=percentiles(r.chunk_ns[0] - r.start_ns for r in streamed),
        inter_token_latency=percentiles(
            after - before for r in streamed for before, after in itertools.pairwise(r.chunk_ns)
        ),
        time_per_output_token=percentiles(
            (r.chunk_ns[-1] - r.chunk_ns[0]) / (r.num_output_tokens - 1)
            for r in streamed
            if len(r.chunk_ns) > 1 and r.num_output_tokens > 1
        ),
        end_to_end=percentiles(record.end_ns - record.start_ns for record in done),
    )


def median_of_runs(runs: Sequence[RunStatistics]) -> RunStatistics:
    """Every rate and latency its own median over the repeats; every count the sum of them."""
    return RunStatistics(
        **{
            name: _joined(name, [getattr(run, name) for run in runs])
            for name in RunStatistics.__struct_fields__
        }
    )


def _joined(name: str, values: Sequence[Any]) -> Any:
    """Return one value of a figure of several runs: counts have names of their own."""
    if name.startswith("num_"):
        return sum(values)
    known = [value for value in values if value is not None]
    match known:
        case [tuple(), *_]:
            return tuple(sorted({error for errors in known for error in errors}))
        case [Percentiles(), *_]:
            columns = zip(*map(msgspec.structs.astuple, known), strict=True)
            return Percentiles(*map(statistics.median, columns))
    return statistics.median(known) if known else None


class Ratio(msgspec.Struct, frozen=True):
    """One run over another, paired by repeat: the median, and how far the repeats lie apart."""

    median: float
    low: float
    high: float


def throughput_ratio(
    runs: Sequence[RunStatistics], base_runs: Sequence[RunStatistics]
) -> Ratio | None:
    """Output tokens per second over the base model's in the same repeat; below 1 is slower.

    None if a run of either had failures: its throughput is of another workload.
    """
    if any(run.num_failed for run in (*runs, *base_runs)):
        return None
    ratios = [
        run.output_tokens_per_second / base.output_tokens_per_second
        for run, base in zip(runs, base_runs, strict=True)
    ]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
