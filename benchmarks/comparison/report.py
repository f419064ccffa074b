"""A comparison as files: JSON with everything, Markdown to read, plots."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from comparison import calibration
from comparison.findings import (
    Finding,
    find,
    ours_for,
    pairs,
    throughput_over,
)
from comparison.journal import Calibrated, Checked, Header, Journal, Limits, Started
from comparison.summary import summary_lines
from loraplex.bench.machine import machine_lines
from loraplex.bench.report import markdown_table, write_pair
from loraplex.bench.statistics import Percentiles, Ratio
from loraplex.core.errors import ConfigError

_NONE = "-"
_COLUMNS = (
    "workload",
    "system",
    "tok/s",
    "TTFT ms",
    "ITL ms",
    "GiB",
    "loads",
    "loraplex is",
)
_FIRST_USE_COLUMNS = ("workload", "system", "first - warm ms", "register ms", "warm TTFT ms", "GiB")
_MAX_ERROR_LENGTH = 200
_MAX_ARGUMENT_LENGTH = 160
_KEPT = 80
"""Characters of an argument that is longer."""


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that the JSON file holds."""

    header: Header
    findings: tuple[Finding, ...]
    checked: tuple[Checked, ...]
    started: tuple[Started, ...]
    calibrated: tuple[Calibrated, ...]
    limits: Limits | None = None


def comparison_report(journal: Journal) -> ComparisonReport:
    return ComparisonReport(
        header=journal.header,
        findings=tuple(find(journal)),
        checked=tuple(journal.of(Checked)),
        started=tuple(e for e in journal.of(Started) if e.stage != calibration.STAGE.name),
        calibrated=tuple(journal.of(Calibrated)),
        limits=next(journal.of(Limits), None),
    )


def write_comparison(report: ComparisonReport, stem: Path) -> tuple[Path, Path]:
    """Write STEM.json and STEM.md; gives both paths. Raises ConfigError."""
    json_path = stem.with_name(stem.name + ".json")
    try:
        return write_pair(report, comparison_markdown(report), json_path)
    except OSError as error:
        raise ConfigError(f"cannot write {json_path}: {error.strerror}") from error


def comparison_markdown(report: ComparisonReport) -> str:
    """A heading, the circumstances, a table for each weight format, what was checked and failed."""
    lines = ["# Comparison", "", *(f"- {line}" for line in _circumstances(report))]
    if summary := [*summary_lines(report.findings, report.started, report.limits)]:
        lines += ["", "## Summary", "", *summary]
    formats = dict.fromkeys(finding.subject.weights for finding in report.findings)
    for weights in formats:
        tables = [*_weights_lines(report.findings, weights)]
        lines += ["", f"## {weights} weights", "", *(tables[:-1] or ["nothing was measured"])]
    for title, section in (
        ("Thread settings", _calibration_lines(report.calibrated)),
        ("Command lines and environment", _launch_lines(report.started)),
        ("Cost of adapters", _ratio_lines(report.findings)),
        ("Outputs in mixed batches", _verdict_lines(report.checked)),
        ("Starts", _start_lines(report.started)),
        ("Not measured", _error_lines(report.findings)),
    ):
        if found := [*section]:
            lines += ["", f"## {title}", "", *found]
    return "\n".join(lines) + "\n"


def _circumstances(report: ComparisonReport) -> Iterator[str]:
    header, settings = report.header, report.header.settings
    yield from machine_lines(header.created, header.code, header.machine)
    yield (
        f"random-weight model {settings.model!r}, {settings.num_parameters / 1e6:.0f}M parameters; "
        f"greedy, no end token, random prompts, no prefix reuse, seed {settings.seed}"
    )
    turns = "one system up at a time" if settings.is_restarting else "all systems up, taking turns"
    yield f"{settings.num_threads} threads each; {settings.rounds} rounds, {turns}"
    for subject in header.subjects:
        version = subject.version or "of unknown version"
        way = "over HTTP" if subject.is_http else "called as a library"
        yield f"{subject.name}: {version}, {subject.weights} weights, {way}"
    yield (
        "tok/s: output tokens, median (lowest-highest) over the rounds; TTFT and ITL: medians over "
        'the rounds of the 50th / 99th percentile; "loraplex is" so many times as fast, at one '
        "weight format and called in the same way, round by round; GiB: all processes of the "
        "system, shared pages counted once"
    )


def _weights_lines(findings: Sequence[Finding], weights: str) -> Iterator[str]:
    chosen = [finding for finding in findings if finding.subject.weights == weights]
    stages = dict.fromkeys(finding.stage for finding in chosen)
    for stage in stages:
        good = [finding for finding in chosen if finding.stage == stage and finding.runs]
        timed = [_row(finding, findings) for finding in good if finding.median is not None]
        first_uses = [_first_use_row(finding) for finding in good if finding.first_uses]
        if timed:
            yield from (f"### {stage}", "", markdown_table(_COLUMNS, timed), "")
        if first_uses:
            yield from (f"### {stage}", "", markdown_table(_FIRST_USE_COLUMNS, first_uses), "")


def _row(finding: Finding, findings: Sequence[Finding]) -> tuple[str, ...]:
    assert finding.median is not None, "the caller chose those that have one"
    ours = ours_for(finding, findings)
    loads = finding.adapter_loads
    return (
        finding.case,
        finding.subject.name,
        _spread(finding.throughput, "{:.0f}"),
        _milliseconds(finding.median.time_to_first_token),
        _milliseconds(finding.median.inter_token_latency),
        _gibibytes(finding),
        _NONE if loads is None else f"{loads:.0f}",
        _times(throughput_over(ours, finding)) if ours is not None else _NONE,
    )


def _first_use_row(finding: Finding) -> tuple[str, ...]:
    last = finding.first_uses
    register = sorted(one.register_seconds for one in last)[len(last) // 2]
    warm = sorted(one.warm_seconds for one in last)[len(last) // 2]
    return (
        finding.case,
        finding.subject.name,
        _spread(finding.extra_seconds, "{:.1f}", scale=1e3),
        f"{register * 1e3:.1f}",
        f"{warm * 1e3:.1f}",
        _gibibytes(finding),
    )


def _ratio_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Throughput with adapters over that of the base, and with many over that with few."""
    cases = dict.fromkeys(finding.case for finding in findings)
    compared = [("W3-8", "W2-8"), ("W3-32", "W2-32")]
    compared += [(case, "W6-n5") for case in cases if case.startswith("W6-n") and case != "W6-n5"]
    for case, base in compared:
        for finding, other in pairs(findings, case, base):
            if (ratio := throughput_over(finding, other)) is not None:
                stage = "" if finding.stage == "standard" else f" ({finding.stage})"
                yield f"- {finding.subject.name}{stage}: {case} is {_times(ratio)} {base}"


def _verdict_lines(checked: Sequence[Checked]) -> Iterator[str]:
    for entry in checked:
        verdict = entry.verdict
        reference = ", alone as the reference" if verdict.is_compared_with_reference else ""
        if verdict.is_right:
            yield (
                f"- {entry.system} ({entry.stage}): right{reference}; {verdict.num_equal} of "
                f"{verdict.num_asked} token for token as alone"
            )
        else:
            yield f"- {entry.system} ({entry.stage}): WRONG: {'; '.join(verdict.problems)}"


def _calibration_lines(calibrated: Sequence[Calibrated]) -> Iterator[str]:
    """What was tried; the last result of each variant counts."""
    if not calibrated:
        return
    yield (
        "Before the rounds, each variant ran alone on short forms of W1 and W2-8, with outputs of "
        "32 tokens: tok/s, medians. The one with the largest geometric mean is measured."
    )
    yield ""
    last = {(entry.system, entry.variant): entry for entry in calibrated}
    rows = []
    for (system, variant), entry in last.items():
        rates = [f"{rate:.0f}" for rate in entry.tokens_per_second.values()]
        is_best = variant == calibration.best_variant(last.values(), system)
        error = (entry.error or "").strip().splitlines()[-1:]
        result = ("chosen" if is_best else "") if entry.error is None else error[0].strip()
        rows.append((system, variant, *(rates or (_NONE, _NONE)), result[:_MAX_ERROR_LENGTH]))
    yield markdown_table(("system", "threads", "W1", "W2-8", ""), rows)


def _launch_lines(started: Sequence[Started]) -> Iterator[str]:
    """The last start of each system: stages differ in their adapters alone."""
    last = {entry.system: entry for entry in started}
    for entry in last.values():
        launch = entry.launch
        yield f"- {entry.system}: `{' '.join(map(_shortened, launch.command))}`"
        for title, variables in (
            ("added to the environment", launch.added),
            ("of the user's environment", launch.inherited),
            ("set by the program for its own processes", _differing(entry)),
        ):
            values = " ".join(f"{name}={value}" for name, value in variables.items())
            yield f"  - {title}: {f'`{values}`' if values else 'none'}"
    if last:
        yield (
            "- each runs with the environment of the person who measured; shown are the variables "
            "of threads (OMP_*, GOMP_*, KMP_*, MKL_*, OPENBLAS_*, LD_PRELOAD) and those added"
        )


def _differing(entry: Started) -> dict[str, str]:
    known = entry.launch.inherited | entry.launch.added
    return {k: v for k, v in entry.children.items() if known.get(k) != v}


def _shortened(argument: str) -> str:
    """Lists of adapters and the options of a worker have thousands of characters."""
    return argument if len(argument) <= _MAX_ARGUMENT_LENGTH else f"{argument[:_KEPT]}..."


def _start_lines(started: Sequence[Started]) -> Iterator[str]:
    for entry in started:
        which = f"{entry.stage}, {entry.kind}" if entry.kind else entry.stage
        yield (
            f"- {entry.system} ({which}): ready in {entry.seconds:.1f} s, "
            f"{entry.resident_bytes / 2**30:.2f} GiB; {entry.idle_cores:.2f} cores busy in the "
            "first second"
        )


def _error_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Each reason once, with the workloads that it kept from being measured."""
    workloads: dict[tuple[str, str], dict[str, None]] = {}
    for finding in findings:
        for error in finding.errors:
            reason = error.strip().splitlines()[-1].strip()[:_MAX_ERROR_LENGTH]
            place = (finding.subject.name, reason)
            workloads.setdefault(place, {})[finding.case] = None
    for (system, reason), cases in workloads.items():
        yield f"- {system}, {', '.join(cases)}: {reason}"


def _spread(values: Ratio | None, form: str, scale: float = 1.0) -> str:
    if values is None:
        return _NONE
    median, low, high = (form.format(v * scale) for v in (values.median, values.low, values.high))
    return f"{median} ({low}-{high})"


def _times(ratio: Ratio | None) -> str:
    if ratio is None:
        return _NONE
    return f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _milliseconds(latency: Percentiles | None) -> str:
    return _NONE if latency is None else f"{latency.p50 * 1e3:.1f} / {latency.p99 * 1e3:.1f}"


def _gibibytes(finding: Finding) -> str:
    return f"{finding.resident_bytes / 2**30:.2f}"
