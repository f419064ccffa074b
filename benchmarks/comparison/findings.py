"""What the entries of a journal come to: medians and spreads of each case and system, and ratios.

A ratio is taken between two runs of one round, which stood side by side, and then the median over
the rounds: so a machine that was slow for a while was slow for both.
"""

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from comparison.first_use import FirstUseFigures
from comparison.journal import Journal, Measured, Subject
from loraplex.bench.statistics import Ratio, RunStatistics, median_of_runs

OURS = "loraplex"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One case on one system."""

    stage: str
    case: str
    subject: Subject
    runs: tuple[Measured, ...]
    """The good ones, by round."""
    median: RunStatistics | None
    """None for a first use, and where no run is good."""
    errors: tuple[str, ...]
    """Why rounds are missing, each text once."""

    @property
    def throughput(self) -> Ratio | None:
        """Output tokens per second: median, lowest, highest."""
        return spread([run.figures.output_tokens_per_second for run in self.runs if run.figures])

    @property
    def first_uses(self) -> tuple[FirstUseFigures, ...]:
        return tuple(run.first_use for run in self.runs if run.first_use)

    @property
    def extra_seconds(self) -> Ratio | None:
        """Extra cost of a first use over a warm one."""
        return spread([first_use.extra_seconds for first_use in self.first_uses])

    @property
    def resident_bytes(self) -> int:
        """The most that was seen."""
        return max((run.resident_bytes for run in self.runs), default=0)

    @property
    def adapter_loads(self) -> float | None:
        """Median per run; None if the system does not report it."""
        loads = [run.adapter_loads for run in self.runs if run.adapter_loads is not None]
        return statistics.median(loads) if loads else None


def find(journal: Journal) -> list[Finding]:
    """Figures by stage and case in the order of their first runs, weight format and system."""
    places = dict.fromkeys((entry.stage, entry.case) for entry in journal.of(Measured))
    subjects = sorted(journal.header.subjects, key=lambda subject: -subject.weight_bits)
    return [
        finding
        for stage, case in places
        for subject in subjects
        if (finding := _finding(journal, stage, case, subject)) is not None
    ]


def _finding(journal: Journal, stage: str, case: str, subject: Subject) -> Finding | None:
    last: dict[int, Measured] = {
        entry.round: entry
        for entry in journal.of(Measured)
        if (entry.stage, entry.case, entry.system) == (stage, case, subject.name)
    }
    if not last:
        return None
    runs = tuple(last[number] for number in sorted(last) if last[number].is_good)
    figures = [run.figures for run in runs if run.figures is not None]
    return Finding(
        stage=stage,
        case=case,
        subject=subject,
        runs=runs,
        median=median_of_runs(figures) if figures else None,
        errors=tuple(dict.fromkeys(_error(run) for run in last.values() if not run.is_good)),
    )


def _error(run: Measured) -> str:
    if run.error is not None:
        return run.error
    assert run.figures is not None, "a run without an error has figures"
    return f"{run.figures.num_failed} requests failed: {run.figures.errors[0]}"


def spread(values: Sequence[float]) -> Ratio | None:
    """Median, lowest, highest; None of nothing."""
    if not values:
        return None
    return Ratio(statistics.median(values), min(values), max(values))


def throughput_over(finding: Finding, other: Finding) -> Ratio | None:
    """Output tokens per second of one over the other, round by round; None if they share none."""
    others = {run.round: run.figures for run in other.runs}
    return spread(
        [
            run.figures.output_tokens_per_second / theirs.output_tokens_per_second
            for run in finding.runs
            if run.figures is not None and (theirs := others.get(run.round)) is not None
        ]
    )


def ours_for(finding: Finding, findings: Sequence[Finding]) -> Finding | None:
    """loraplex's own finding of the same case and weights, called in the same way: over HTTP or as
    a library; None for one that is ours.
    """
    if is_ours(finding.subject):
        return None
    for other in findings:
        if is_ours(other.subject) and _place(other) == _place(finding):
            return other
    return None


def _place(finding: Finding) -> tuple[str, str, str, bool]:
    return finding.stage, finding.case, finding.subject.weights, finding.subject.is_http


def is_ours(subject: Subject) -> bool:
    return subject.name.split()[0] == OURS


def pairs(
    findings: Sequence[Finding], case: str, base_case: str
) -> Iterator[tuple[Finding, Finding]]:
    """The findings of two cases on the same system and stage."""
    for finding in findings:
        for base in findings:
            if (
                finding.case == case
                and base.case == base_case
                and finding.subject == base.subject
                and finding.stage == base.stage
            ):
                yield finding, base
