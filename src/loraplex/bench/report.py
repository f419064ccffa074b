"""A result as a file: JSON that holds everything, and a Markdown table to read.

Compare a figure only with the figures of its own report: other machines, loads and settings give
others. So the JSON holds the commit, machine, settings and workloads with the results.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from loraplex.bench.machine import Code, Machine, machine_lines
from loraplex.bench.settings import BenchSettings
from loraplex.bench.statistics import Percentiles, Ratio, RunStatistics
from loraplex.bench.workload import Workload
from loraplex.core.errors import ConfigError


class DatedReport(Protocol):
    """What names a report's files."""

    @property
    def created(self) -> str:
        """UTC, ISO 8601."""
        ...

    @property
    def code(self) -> Code: ...


def write_dated(
    report: DatedReport, markdown: str, folder: Path, *, kind: str
) -> tuple[Path, Path]:
    """Write `KIND-TIME-COMMIT.json` and `.md` into folder, which is made; gives both paths.

    Raises ConfigError if it cannot be written.
    """
    commit = (report.code.commit or report.code.version)[:12]
    moment = report.created.replace("-", "").replace(":", "").partition("+")[0]
    json_path = folder / f"{kind}-{moment}-{commit}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write_pair(report, markdown, json_path)
    except OSError as error:
        raise ConfigError(f"cannot write a report into {folder}: {error.strerror}") from error


def write_pair(report: object, markdown: str, json_path: Path) -> tuple[Path, Path]:
    """Both files, of one name. Raises OSError."""
    markdown_path = json_path.with_suffix(".md")
    json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    markdown_path.write_text(markdown, encoding="utf-8")
    return json_path, markdown_path


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is aligned, so that a terminal shows it too."""
    every = [columns, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(columns))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(row, widths) for row in (columns, rule, *rows))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(map(str.ljust, row, widths))} |"


FORMAT_VERSION = 1

_COLUMNS = (
    "load",
    "adapters",
    "req/s",
    "tok/s",
    "TTFT ms",
    "ITL ms",
    "TPOT ms",
    "E2E ms",
    "tok/s to base",
)
_NONE = "-"


class WorkloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counted runs of one workload, one for each repeat."""

    workload: Workload
    runs: tuple[RunStatistics, ...]
    median: RunStatistics
    throughput_ratio_to_base: Ratio | None
    """None for the base model itself, and where requests failed."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    model: str
    url: str | None
    """URL of a server that was running; None: `loraplex serve`, started for the benchmark."""
    serve_flags: tuple[str, ...] = ()
    """Given to that `loraplex serve`."""
    adapter_rank: int | None = None
    """Rank of the random adapters; None: the adapters are the server's own."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    format_version: int = FORMAT_VERSION
    created: str
    """UTC, ISO 8601."""
    code: Code
    machine: Machine
    served: Served
    settings: BenchSettings
    results: tuple[WorkloadResult, ...]

    @property
    def num_failed(self) -> int:
        return sum(result.median.num_failed for result in self.results)


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write `bench-TIME-COMMIT.json` and `.md` into folder, which is made; gives both paths.

    Raises ConfigError if it cannot be written.
    """
    return write_dated(report, markdown(report), folder, kind="bench")


def markdown(report: Report) -> str:
    """A heading, the circumstances, the table, and what it comes to."""
    lines = ["# loraplex bench", "", *(f"- {line}" for line in circumstances(report))]
    return "\n".join([*lines, "", table(report.results), "", *_notes(report)]) + "\n"


def circumstances(report: Report) -> Iterator[str]:
    """Yield the lines above the table, which explain how it was measured."""
    served, settings = report.served, report.settings
    yield from machine_lines(report.created, report.code, report.machine)
    if served.url is None:
        flags = f" with {' '.join(served.serve_flags)}" if served.serve_flags else ""
        yield (
            f"model {served.model}, `loraplex serve`{flags} on the same machine as the load "
            f"generator; {settings.num_adapters} random adapters of rank {served.adapter_rank}"
        )
    else:
        yield f"model {served.model} at {served.url}, {settings.num_adapters} of its adapters"
    yield (
        f"{settings.prompt_tokens} prompt and {settings.output_tokens} output tokens, seed "
        f"{settings.seed}, medians over {settings.repeats} repeats"
    )


def table(results: Sequence[WorkloadResult]) -> str:
    """The results as a Markdown table."""
    return markdown_table(_COLUMNS, [_row(result) for result in results])


def _row(result: WorkloadResult) -> tuple[str, ...]:
    median = result.median
    return (
        str(result.workload.arrivals),
        str(result.workload.popularity),
        f"{median.requests_per_second:.2f}",
        f"{median.output_tokens_per_second:.1f}",
        _milliseconds(median.time_to_first_token),
        _milliseconds(median.inter_token_latency),
        _milliseconds(median.time_per_output_token),
        _milliseconds(median.end_to_end),
        _ratio(result.throughput_ratio_to_base),
    )


def _milliseconds(latency: Percentiles | None) -> str:
    if latency is None:
        return _NONE
    return " / ".join(f"{value * 1e3:.1f}" for value in (latency.p50, latency.p90, latency.p99))


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return _NONE
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _notes(report: Report) -> Iterator[str]:
    yield (
        "Latencies are p50 / p90 / p99. `tok/s to base` is the output throughput over that of the "
        "base model alone in the same repeat: median (lowest-highest); one minus it is the LoRA "
        "tax. Compare figures within this report only."
    )
    totals = [result.median for result in report.results]
    if num_cached := sum(run.num_cached_tokens for run in totals):
        num_prompt_tokens = sum(run.num_prompt_tokens for run in totals)
        yield f"\n{num_cached} of {num_prompt_tokens} prompt tokens were in the prefix cache."
    if report.num_failed:
        errors = sorted({error for run in totals for error in run.errors})
        yield f"\n{report.num_failed} requests FAILED and are left out: {'; '.join(errors)}"
    yield f"\n{_verdict(report.results[-1])}"


def _verdict(result: WorkloadResult) -> str:
    """Return a workload's figures as sentences."""
    median, ratio = result.median, result.throughput_ratio_to_base
    num_done = median.num_requests - median.num_failed
    share = "" if ratio is None else f", {ratio.median:.2f} times those of the base model alone"
    text = (
        f"{result.workload.arrivals}, {result.workload.popularity}: {num_done} of "
        f"{median.num_requests} requests succeeded, with {median.output_tokens_per_second:.0f} "
        f"output tokens a second{share}."
    )
    if (first := median.time_to_first_token) is not None:
        text += (
            f" The first token took {first.p50 * 1e3:.0f} ms (median) and {first.p99 * 1e3:.0f} ms "
            "(99th percentile)."
        )
    return text
