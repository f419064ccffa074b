"""A table with one row for each system: what users of a large model look at first.

Figures of peers have the ratio in brackets: how many times as good loraplex's figure is at the same
weights, called in the same way.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from comparison.findings import Finding, is_ours
from comparison.held_streams import Share
from comparison.journal import Limits, Started, StartKind, Subject
from loraplex.bench.report import markdown_table
from loraplex.bench.statistics import RunStatistics

_NONE = "-"
_STAGE = "standard"
_GIB = 1 << 30
_SHARES: tuple[Share, ...] = ("p90", "p99")


class _Figure(msgspec.Struct, frozen=True):
    """A column."""

    title: str
    value: Callable[["_Row"], float | None]
    form: str
    is_better_small: bool = False
    has_ratio: bool = True


class _Row:
    """What was found of one system."""

    def __init__(
        self,
        subject: Subject,
        findings: Sequence[Finding],
        started: Sequence[Started],
        limits: Limits | None,
    ) -> None:
        self.subject = subject
        self._started = [entry for entry in started if entry.system == subject.name]
        self._limits = limits
        self._findings = {
            finding.case: finding
            for finding in findings
            if (finding.subject, finding.stage) == (subject, _STAGE)
        }

    def first_token(self, case: str, share: str) -> float | None:
        median = self._median(case)
        found = median and median.time_to_first_token
        return 1e3 * getattr(found, share) if found else None

    def decode_rate(self) -> float | None:
        """Return the tokens of one stream in a second, its first one apart."""
        median = self._median("W1")
        found = median and median.time_per_output_token
        return 1 / found.p50 if found and found.p50 else None

    def share_of_floor(self) -> float | None:
        """Return the percentage of the rate at which memory could bring the weights."""
        rate = self.decode_rate()
        if rate is None or self._limits is None:
            return None
        num_bytes = self._limits.token_bytes.get(self.subject.weights)
        return None if num_bytes is None else 100 * rate * num_bytes / self._limits.read_bytes

    def throughput(self, case: str) -> float | None:
        finding = self._findings.get(case)
        spread = finding and finding.throughput
        return spread.median if spread else None

    def start(self, kind: StartKind) -> float | None:
        seconds = [entry.seconds for entry in self._started if entry.kind == kind]
        return statistics.median(seconds) if seconds else None

    def memory(self, *, is_file: bool) -> float | None:
        """Return the GiB of all processes, of the run that had the most in memory."""
        runs = [run for finding in self._findings.values() for run in finding.runs]
        if not runs:
            return None
        most = max(runs, key=lambda run: run.resident_bytes)
        return (most.file_bytes if is_file else most.resident_bytes - most.file_bytes) / _GIB

    def held(self, share: Share) -> tuple[float, float] | None:
        """Return streams and tokens a second, the median of rounds; None: it was not measured."""
        finding = self._findings.get("held")
        rounds = [run.held for run in finding.runs if run.held] if finding else []
        if not rounds:
            return None
        most = [figures.most(share) for figures in rounds]
        return (
            statistics.median_low([rung.num_streams if rung else 0 for rung in most]),
            statistics.median([rung.output_tokens_per_second if rung else 0.0 for rung in most]),
        )

    def _median(self, case: str) -> RunStatistics | None:
        finding = self._findings.get(case)
        return finding.median if finding else None


_FIGURES = (
    _Figure("TTFT, 1 prompt, ms", lambda row: row.first_token("W1", "p50"), "{:.0f}", True),
    _Figure("TTFT, last of 8, ms", lambda row: row.first_token("W2-8", "p99"), "{:.0f}", True),
    _Figure("decode, 1 stream, tok/s", _Row.decode_rate, "{:.2f}"),
    _Figure("of the byte floor, %", _Row.share_of_floor, "{:.0f}", has_ratio=False),
    _Figure("8 streams, tok/s", lambda row: row.throughput("W2-8"), "{:.2f}"),
    _Figure("8 streams, 8 adapters, tok/s", lambda row: row.throughput("W3-8"), "{:.2f}"),
    _Figure("mix (W4), tok/s", lambda row: row.throughput("W4"), "{:.2f}"),
    _Figure("cold start, s", lambda row: row.start("cold"), "{:.1f}", True),
    _Figure("warm start, s", lambda row: row.start("warm"), "{:.1f}", True),
    _Figure("memory, GiB", lambda row: row.memory(is_file=False), "{:.2f}", True, False),
    _Figure("mapped files, GiB", lambda row: row.memory(is_file=True), "{:.2f}", True, False),
)


def summary_lines(
    findings: Sequence[Finding],
    started: Sequence[Started],
    limits: Limits | None,
) -> Iterator[str]:
    """Yield the tables; nothing where no cold start was measured."""
    if not any(entry.kind == "cold" for entry in started):
        return
    subjects = dict.fromkeys(finding.subject.name for finding in findings)
    by_name = {finding.subject.name: finding.subject for finding in findings}
    rows = [_Row(by_name[name], findings, started, limits) for name in subjects]
    table = [(row.subject.name, *(_cell(figure, row, rows) for figure in _FIGURES)) for row in rows]
    yield markdown_table(("system", *(figure.title for figure in _FIGURES)), table)
    if limits is not None:
        sizes = ", ".join(f"{w}: {n / 1e9:.2f} GB" for w, n in limits.token_bytes.items())
        yield ""
        rate = f"{limits.read_bytes / 1e9:.1f} GB/s"
        yield (
            f"byte floor: the weights that a token reads ({sizes}) at {rate}, measured; memory: "
            "without mapped files, which a second process shares"
        )
    held = [*_held_rows(rows)]
    if held:
        columns = ("system", "streams at p90", "tok/s", "streams at p99", "tok/s")
        yield from ("", "### Streams held under 100 ms between tokens", "")
        yield markdown_table(columns, held)


def _cell(figure: _Figure, row: _Row, rows: Sequence[_Row]) -> str:
    value = figure.value(row)
    if value is None:
        return _NONE
    text = figure.form.format(value)
    ours = next((other for other in rows if _is_counterpart(other.subject, row.subject)), None)
    own = figure.value(ours) if ours is not None and figure.has_ratio else None
    if not own or not value:
        return text
    ratio = value / own if figure.is_better_small else own / value
    return f"{text} ({ratio:.2f}x)"


def _is_counterpart(ours: Subject, subject: Subject) -> bool:
    same = (ours.weights, ours.is_http) == (subject.weights, subject.is_http)
    return same and is_ours(ours) and not is_ours(subject)


def _held_rows(rows: Sequence[_Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        found = [row.held(share) for share in _SHARES]
        if any(found):
            cells = [
                cell
                for each in found
                for cell in ((f"{each[0]}", f"{each[1]:.1f}") if each else (_NONE, _NONE))
            ]
            yield (row.subject.name, *cells)
