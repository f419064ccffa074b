"""What adapters cost that come and go: requests to a few of them against requests to any of many.

Both sides are run in turns against one server whose tiers hold few of the many.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from comparison.adapter_tiers import (
    AdapterUse,
    TierCounters,
    reuse_distances,
    sum_counters,
)
from loraplex.bench.machine import Code, Machine, machine_lines
from loraplex.bench.report import markdown_table, write_dated
from loraplex.bench.statistics import (
    Percentiles,
    Ratio,
    RequestRecord,
    RunStatistics,
    median_of_runs,
    percentiles,
    summarize,
)
from loraplex.bench.workload import Workload

_NONE = "-"


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity in adapters, which are all of one size."""

    num_device: int
    num_host: int
    device_bytes: int
    host_bytes: int

    def labels(self) -> tuple[str, str, str]:
        """Latencies of the three kinds of requests that `nearest` distinguishes."""
        return (
            f"one of the {self.num_device} adapters used last",
            f"one of the {self.num_host} before those",
            "used earlier, or never",
        )

    def nearest(self, distance: int | None) -> str:
        """The label of a request, by its reuse distance: the first tier whose reach it is in."""
        on_device, on_host, nowhere = self.labels()
        if distance is None or distance >= self.num_device + self.num_host:
            return nowhere
        return on_device if distance < self.num_device else on_host


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a side."""

    workload: Workload
    start_ns: int
    adapters: tuple[int, ...]
    """Latencies of the requests."""
    records: tuple[RequestRecord, ...]
    counters: TierCounters
    """Counts of this run."""

    def figures(self) -> RunStatistics:
        return summarize(self.records, self.start_ns)


class TierWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long requests of one kind waited for their first token."""

    label: str
    num_requests: int
    time_to_first_token: Percentiles | None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """All requests of one workload."""

    workload: Workload
    runs: tuple[RunStatistics, ...]
    median: RunStatistics
    counters: TierCounters
    waits: tuple[TierWait, ...]

    @property
    def num_adapters(self) -> int:
        return self.workload.num_adapters


class ChurnReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that the JSON file holds."""

    created: str
    """UTC, ISO 8601."""
    code: Code
    machine: Machine
    model: str
    serve_flags: tuple[str, ...]
    tiers: Tiers
    ready_seconds: float
    """Time from the start of the server, in an empty state, until all adapters are registered."""
    few: Side
    many: Side
    num_registered: int
    throughput_ratio: Ratio | None
    """Ratio of many to few, turn by turn; None if requests failed."""
    num_listed: int
    """Counters of the many, at the end."""
    num_on_device: int
    num_on_host: int

    @property
    def is_whole(self) -> bool:
        """Whether every request was complete, and every adapter is still there."""
        num_failed = self.few.median.num_failed + self.many.median.num_failed
        return num_failed == 0 and self.num_listed == self.num_registered


def side_of(workload: Workload, turns: Sequence[Turn], tiers: Tiers) -> Side:
    """What the turns of a workload found. `turns` are all in their order: all used the tiers."""
    own = [turn for turn in turns if turn.workload == workload]
    runs = tuple(turn.figures() for turn in own)
    return Side(
        workload=workload,
        runs=runs,
        median=median_of_runs(runs),
        counters=sum_counters([turn.counters for turn in own]),
        waits=tuple(_waits(workload, turns, tiers)),
    )


def _waits(workload: Workload, turns: Sequence[Turn], tiers: Tiers) -> Iterator[TierWait]:
    every = [
        (turn.workload, adapter, record)
        for turn in turns
        for adapter, record in zip(turn.adapters, turn.records, strict=True)
    ]
    distances = reuse_distances(
        [AdapterUse(adapter, record.start_ns, record.end_ns) for _, adapter, record in every]
    )
    waits: dict[str, list[int]] = {label: [] for label in tiers.labels()}
    for (used_by, _, record), distance in zip(every, distances, strict=True):
        if used_by == workload and record.error is None and record.chunk_ns:
            waits[tiers.nearest(distance)].append(record.chunk_ns[0] - record.start_ns)
    for label, found in waits.items():
        yield TierWait(label=label, num_requests=len(found), time_to_first_token=percentiles(found))


def write_churn(report: ChurnReport, folder: Path) -> tuple[Path, Path]:
    """Write `adapter-churn-TIME-COMMIT.json` and `.md` into folder, which is made; gives both.

    Raises ConfigError if it cannot be written.
    """
    return write_dated(report, markdown(report), folder, kind="adapter-churn")


def markdown(report: ChurnReport) -> str:
    lines = ["# adapter churn", "", *(f"- {line}" for line in _circumstances(report))]
    return "\n".join([*lines, "", table(report), "", *_notes(report)]) + "\n"


def _circumstances(report: ChurnReport) -> Iterator[str]:
    yield from machine_lines(report.created, report.code, report.machine)
    yield f"model {report.model}, `loraplex serve` with {' '.join(report.serve_flags)}"
    many, tiers = report.many, report.tiers
    yield (
        f"{report.num_registered} random adapters of one size, registered from an empty state and "
        f"ready {report.ready_seconds:.0f} s after the start; {tiers.device_bytes} bytes on the "
        f"device hold {tiers.num_device}, {tiers.host_bytes} on the host {tiers.num_host}"
    )
    workload = many.workload
    yield (
        f"{workload.arrivals}, {workload.prompt_tokens} prompt and {workload.output_tokens} output "
        f"tokens, popularity {workload.popularity}, seed {workload.seed}; "
        f"{len(many.runs)} turns each"
    )
    yield (
        f"afterwards: {report.num_listed} adapters listed, {report.num_on_device} on the device, "
        f"{report.num_on_host} on the host"
    )


def table(report: ChurnReport) -> str:
    """A row for each figure, a column for each side."""
    sides = (report.few, report.many)
    figures = [dict(_figures(side)) for side in sides]
    rows = [(name, *(found[name] for found in figures)) for name in figures[0]]
    rows.append((f"tok/s to {report.few.num_adapters} adapters", "1", _ratio(report)))
    return markdown_table(["", *(f"{side.num_adapters} adapters" for side in sides)], rows)


def _figures(side: Side) -> Iterator[tuple[str, str]]:
    """(name, value); the names are the same for every side."""
    counters, median = side.counters, side.median
    yield "requests", str(median.num_requests)
    yield "lost", str(median.num_failed)
    yield "loads", f"{counters.loads:.0f}"
    yield "hit rate on the device", _percent(counters.device_hit_rate)
    yield "of its misses, hit rate on the host", _percent(counters.host_hit_rate)
    yield (
        "evictions, device / host",
        f"{counters.device_evictions:.0f} / {counters.host_evictions:.0f}",
    )
    yield (
        "ms a load, ms a copy",
        f"{_mean_ms(counters.read_seconds, counters.loads)}, "
        + _mean_ms(counters.copy_seconds, counters.copies),
    )
    yield "TTFT ms", _milliseconds(median.time_to_first_token)
    for wait in side.waits:
        value = f"{_milliseconds(wait.time_to_first_token)} ({wait.num_requests})"
        yield f"TTFT ms, {wait.label}", value
    yield "ITL ms", _milliseconds(median.inter_token_latency)
    yield "E2E ms", _milliseconds(median.end_to_end)
    yield "req/s", f"{median.requests_per_second:.1f}"
    yield "tok/s", f"{median.output_tokens_per_second:.0f}"


def _notes(report: ChurnReport) -> Iterator[str]:
    yield (
        "Latencies are p50 / p90 / p99, those by tier with the number of requests. Rates, and "
        "latencies of all requests, are medians over the turns; loads, hits and evictions are the "
        "server's own counts over all turns. A response does not show its adapter's tier, so TTFT "
        "by tier goes by when the client last saw the adapter in use: those used last are on the "
        "device. The host tier keeps what left the device only where the device has memory of its "
        "own; on a CPU all that is not on the device is read from its file."
    )
    sides = (report.few, report.many)
    errors = sorted(set(itertools.chain.from_iterable(side.median.errors for side in sides)))
    if errors:
        yield f"\nRequests FAILED and are left out: {'; '.join(errors)}"


def _milliseconds(latency: Percentiles | None) -> str:
    if latency is None:
        return _NONE
    return " / ".join(f"{value * 1e3:.1f}" for value in (latency.p50, latency.p90, latency.p99))


def _mean_ms(seconds: float, count: float) -> str:
    return f"{seconds / count * 1e3:.2f}" if count else _NONE


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.1%}"


def _ratio(report: ChurnReport) -> str:
    ratio = report.throughput_ratio
    return _NONE if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
