"""One comparison from nothing to its files."""

import asyncio
import datetime
from collections.abc import Sequence
from pathlib import Path

from comparison.cases import Stage
from comparison.estimate import estimated_seconds, token_bytes
from comparison.fixtures import Fixture
from comparison.journal import ComparisonSettings, Header, Journal, Limits, Subject
from comparison.report import comparison_report, write_comparison
from comparison.runner import Comparison, Progress, TimeLimits
from comparison.shapes import ModelShape
from comparison.sizes import STANDARD, Sizes
from comparison.systems import System
from loraplex.bench.machine import this_code, this_machine
from loraplex.core.errors import ConfigError

REFERENCE = "transformers + peft f32"
"""The system with the right outputs, if it is there."""


async def run_comparison(
    systems: Sequence[System],
    fixture: Fixture,
    stages: Sequence[Stage],
    settings: ComparisonSettings,
    *,
    limits: TimeLimits,
    progress: Progress,
    output: Path,
    sizes: Sizes = STANDARD,
) -> tuple[Path, ...]:
    """Run what `output`'s journal does not have yet; gives the files that were written.

    output: a path without suffix; `.jsonl` is the journal, next to it come `.json`, `.md` and
    pictures, and the logs of the systems in a folder `.logs`. Raises ConfigError.
    """
    header = Header(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        code=this_code(),
        machine=this_machine(),
        settings=settings,
        subjects=tuple(map(_subject, systems)),
    )
    journal = Journal.open(_beside(output, ".jsonl"), header)
    if sizes.is_short:
        if next(journal.of(Limits), None) is None:
            journal.add(await asyncio.to_thread(machine_limits, fixture.shape, systems, settings))
        progress.say(_estimate(fixture.shape, journal, systems, stages, sizes))
    comparison = Comparison(
        systems,
        fixture,
        journal,
        limits=limits,
        progress=progress,
        work=_beside(output, ".logs").absolute(),
        reference=next((system for system in systems if system.name == REFERENCE), None),
        sizes=sizes,
    )
    try:
        await comparison.run(stages)
    finally:
        paths = write_files(journal, output)
    return paths


def _estimate(
    shape: ModelShape,
    journal: Journal,
    systems: Sequence[System],
    stages: Sequence[Stage],
    sizes: Sizes,
) -> str:
    settings, limits = journal.header.settings, next(journal.of(Limits))
    seconds = estimated_seconds(shape, limits, systems, stages, settings, sizes)
    parts = ", ".join(f"{name} {value / 60:.0f}" for name, value in seconds.items())
    return f"estimated minutes: {sum(seconds.values()) / 60:.0f} ({parts}), without making files"


def machine_limits(
    shape: ModelShape, systems: Sequence[System], settings: ComparisonSettings
) -> Limits:
    """Measure them, in some seconds. Raises ConfigError without a C++ compiler."""
    # It imports torch, which nothing else here needs.
    from machine_limits import measure_limits  # noqa: PLC0415

    try:
        found = measure_limits(settings.num_threads)
    except SystemExit as error:
        raise ConfigError(str(error)) from error
    return Limits(
        read_bytes=found.read_bytes,
        flops=found.flops,
        token_bytes={system.weights: token_bytes(shape, system.weights) for system in systems},
    )


def write_files(journal: Journal, output: Path) -> tuple[Path, ...]:
    """Report and pictures of what the journal holds. Raises ConfigError."""
    # matplotlib takes a second to import, and not everyone who measures has it.
    from comparison.plots import write_plots  # noqa: PLC0415

    report = comparison_report(journal)
    return (*write_comparison(report, output), *write_plots(report.findings, output))


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def _subject(system: System) -> Subject:
    return Subject(
        name=system.name,
        weights=system.weights,
        weight_bits=system.weight_bits,
        is_http=system.is_http,
        mixes_adapters=system.mixes_adapters,
        version=system.version(),
    )
