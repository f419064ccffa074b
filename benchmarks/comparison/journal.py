"""What a comparison has found so far: a file of JSON lines, one a result, written as they come.

A comparison that is started again with the same file goes on where it was, so a crash costs what
was in progress.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from comparison.first_use import FirstUseFigures
from comparison.held_streams import HeldFigures
from comparison.processes import Launch
from comparison.right_answers import Verdict
from loraplex.bench.machine import Code, Machine
from loraplex.bench.statistics import RunStatistics
from loraplex.core.errors import ConfigError

FORMAT_VERSION = 2


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A system, as the report shows it."""

    name: str
    weights: str
    weight_bits: int
    is_http: bool
    mixes_adapters: bool
    version: str


class ComparisonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a comparison; all results of one file have the same."""

    model: str
    """The fixture's name."""
    num_parameters: int
    groups: tuple[str, ...]
    """The workloads."""
    rounds: int
    num_threads: int
    num_many: int
    """Adapters of W6."""
    seed: int
    is_restarting: bool
    """Whether only one system was up at a time, started anew for every round."""
    variants: tuple[str, ...] = ()
    """Names of the only settings of threads that were tried; none: all that a system has."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """The first line."""

    format_version: int = FORMAT_VERSION
    created: str
    """UTC, ISO 8601."""
    code: Code
    machine: Machine
    settings: ComparisonSettings
    subjects: tuple[Subject, ...]


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """Whether a system is right in mixed batches."""

    system: str
    stage: str
    verdict: Verdict


StartKind = Literal["first", "cold", "warm", ""]


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A start of a system."""

    system: str
    stage: str
    seconds: float
    kind: StartKind = ""
    """first: files may have had to be made; cold: those of the model were not in the page cache;
    warm: right after the cold start. Empty: it was not measured which."""
    resident_bytes: int
    idle_cores: float
    """Cores that it keeps busy while it has nothing to do: it takes them from the others."""
    launch: Launch
    children: dict[str, str] = {}
    """Variables of OpenMP and the like that its other processes run with."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, tag="limits"):
    """Limits of the machine (machine_limits.py), and what a decoded token reads at least."""

    read_bytes: float
    """Bytes that all threads read from memory in a second."""
    flops: float
    """Multiply-adds of float32, two operations each, a second."""
    token_bytes: dict[str, int]
    """Bytes of the weights that one token reads, by weight format."""


class Calibrated(msgspec.Struct, frozen=True, kw_only=True, tag="calibrated"):
    """A setting of threads that was tried, or why it could not be."""

    system: str
    variant: str
    tokens_per_second: dict[str, float] = {}
    """Median of output tokens per second, by workload."""
    error: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """One run, or why there is none."""

    system: str
    stage: str
    case: str
    round: int
    figures: RunStatistics | None = None
    first_use: FirstUseFigures | None = None
    held: HeldFigures | None = None
    error: str | None = None
    resident_bytes: int = 0
    """Memory of all its processes, right after the run."""
    file_bytes: int = 0
    """Share of it that is mapped from files."""
    cpu_seconds: float = 0.0
    """That its processes used for the run."""
    adapter_loads: float | None = None
    """Loads in the run; None: the system does not report them."""
    load_average: float | None = None
    """Load average of the machine before the run."""

    @property
    def is_good(self) -> bool:
        """Whether its figures count."""
        return self.error is None and (self.figures is None or not self.figures.num_failed)


Result = Checked | Started | Limits | Calibrated | Measured
Entry = Header | Result
EntryT = TypeVar("EntryT", Checked, Started, Limits, Calibrated, Measured)


class Journal:
    """The entries of one file, in their order."""

    def __init__(self, path: Path, header: Header, entries: list[Entry]) -> None:
        self.header = header
        self._path = path
        self._entries = entries

    @classmethod
    def open(cls, path: Path, header: Header) -> "Journal":
        """Go on with the file, or begin it. Raises ConfigError if it is of another comparison."""
        if path.exists():
            journal = read_journal(path)
            journal._check_same(header)
            return journal
        journal = cls(path, header, [])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(header) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        return journal

    def add(self, entry: Result) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        self._entries.append(entry)

    def of(self, kind: type[EntryT]) -> Iterator[EntryT]:
        """The entries of one kind."""
        return (entry for entry in self._entries if isinstance(entry, kind))

    def measured(self, system: str, stage: str, case: str, number: int) -> Measured | None:
        """The last word on a run, if there is one."""
        found = None
        for entry in self.of(Measured):
            if (entry.system, entry.stage, entry.case, entry.round) == (
                system,
                stage,
                case,
                number,
            ):
                found = entry
        return found

    def verdict(self, system: str, stage: str) -> Verdict | None:
        found = None
        for entry in self.of(Checked):
            if (entry.system, entry.stage) == (system, stage):
                found = entry.verdict
        return found

    def _check_same(self, header: Header) -> None:
        mine, theirs = self.header, header
        differences = [
            f"{label} was {before}, is {now}"
            for label, before, now in (
                ("the settings", mine.settings, theirs.settings),
                ("the commit", mine.code.commit, theirs.code.commit),
                ("the processor", mine.machine.cpu_model, theirs.machine.cpu_model),
                ("the systems", _identities(mine), _identities(theirs)),
            )
            if before != now
        ]
        if differences:
            raise ConfigError(
                f"{self._path} holds another comparison ({'; '.join(differences)}): name another "
                "file, or remove this one"
            )


def read_journal(path: Path) -> Journal:
    """Raises ConfigError for a file that is no journal. A last line cut short is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    entries: list[Entry] = []
    for number, line in enumerate(lines):
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except msgspec.DecodeError as error:
            if number + 1 == len(lines) and entries:
                _cut(path, line)
                break
            raise ConfigError(f"{path} line {number + 1} is no result: {error}") from error
    if not entries or not isinstance(entries[0], Header):
        raise ConfigError(f"{path} is no journal of a comparison: its first line is no header")
    if entries[0].format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {entries[0].format_version}; this loraplex reads "
            f"{FORMAT_VERSION}"
        )
    return Journal(path, entries[0], entries[1:])


def _cut(path: Path, line: bytes) -> None:
    """Remove a last line that a crash left unfinished: the next one would be glued to it."""
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(line)])


def _identities(header: Header) -> tuple[tuple[str, str], ...]:
    return tuple((subject.name, subject.version) for subject in header.subjects)
