"""Replays a journal's inputs through a new control plane, and compares the plans.

No model is needed: the results of the steps are in the journal. A plan is a function of the entries
before it, so the first difference shows which step this version of the code plans differently.
"""

import dataclasses
from collections.abc import Callable, Iterable

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import LoraplexError, StepFailedError, error_from_info
from loraplex.core.plan import Capacity, StepPlan, StepResult
from loraplex.engine.engine import Engine, build_engine
from loraplex.engine.journal import (
    CommandTaken,
    JournalEntry,
    JournalHeader,
    LoadEnded,
    PlanMade,
    StepEnded,
)
from loraplex.engine.journal_file import JournalError, JournalLine
from loraplex.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineCommand,
    PinAdapter,
    PreloadAdapter,
    RegisterAdapter,
    UnpinAdapter,
    UnregisterAdapter,
)


class ReplayRefusedError(Exception):
    """Error of a journal whose engine cannot be built here."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayDifference:
    """First difference between a replay and its journal."""

    line: JournalLine
    problem: str
    planned: StepPlan | None = None
    """Plan of this code; the line has the journal's plan."""


@dataclasses.dataclass(slots=True)
class ReplaySummary:
    """Counts of a replay."""

    steps: int = 0
    """Steps whose plan and end were the journal's."""
    failed_steps: int = 0
    requests: int = 0
    aborts: int = 0
    adapter_loads: int = 0
    preemptions: int = 0
    is_cut: bool = False
    """Whether the journal ends within a step."""
    difference: ReplayDifference | None = None


def replay(
    header: JournalHeader,
    lines: Iterable[JournalLine],
    on_line: Callable[[JournalLine], object] = lambda _line: None,
    *,
    check_every: int = 1,
) -> ReplaySummary:
    """Replay a journal until the first difference or its end.

    The engine's invariants are checked after every `check_every`-th step. Raises
    ReplayRefusedError, and what iterating over `lines` raises.
    """
    tape = _Tape(lines, on_line)
    engine = _build(header, tape)
    while not tape.is_over:
        _play_next(engine, tape, check_every)
    tape.summary.preemptions = engine.stats().preemptions
    return tape.summary


class _Tape:
    """Lines of a journal, and the summary so far.

    It is the Journal of the new engine: each entry that the engine writes must be the next line.
    """

    def __init__(
        self, lines: Iterable[JournalLine], on_line: Callable[[JournalLine], object]
    ) -> None:
        self._lines = iter(lines)
        self._on_line = on_line
        self.summary = ReplaySummary()
        self.line = next(self._lines, None)
        self._played = self.line

    @property
    def entry(self) -> JournalEntry | None:
        """Next entry; None at the end."""
        return None if self.line is None else self.line.entry

    @property
    def is_over(self) -> bool:
        return self.line is None or self.summary.difference is not None

    def differs(self, problem: str, planned: StepPlan | None = None) -> None:
        """Note a difference. Only the first one counts: the others follow from it."""
        if self.line is None:
            self.summary.is_cut = True
        elif self.summary.difference is None:
            self.summary.difference = ReplayDifference(self.line, problem, planned)

    def failed(self, error: Exception) -> None:
        """Note that the engine failed on the line played last."""
        if self.summary.difference is None and self._played is not None:
            problem = f"the scheduler failed: {type(error).__name__}: {error}"
            self.summary.difference = ReplayDifference(self._played, problem)

    def begin(self, header: JournalHeader) -> None: ...

    def write(self, entry: JournalEntry) -> None:
        if self.is_over or self.entry != entry:
            self.differs(
                _problem(self.entry, entry), entry.plan if isinstance(entry, PlanMade) else None
            )
            return
        self._count(entry)
        assert self.line is not None
        self._on_line(self.line)
        self._played = self.line
        self.line = next(self._lines, None)

    def close(self) -> None: ...

    def _count(self, entry: JournalEntry) -> None:
        summary = self.summary
        match entry:
            case CommandTaken(_, AddRequest()):
                summary.requests += 1
            case CommandTaken(_, AbortRequest()):
                summary.aborts += 1
            case PlanMade():
                summary.adapter_loads += len(entry.loads)
            case StepEnded():
                summary.steps += 1
                summary.failed_steps += entry.error is not None


class _TapeClock:
    """Implements core.clock.Clock: the time of the next entry."""

    def __init__(self, tape: _Tape) -> None:
        self._tape = tape
        self._now_ns = 0

    def now_ns(self) -> int:
        entry = self._tape.entry
        if isinstance(entry, CommandTaken | PlanMade | StepEnded):
            self._now_ns = entry.now_ns
        return self._now_ns


class _TapeLoader:
    """Loader whose loads end when they ended in the journal."""

    def __init__(self, tape: _Tape) -> None:
        self._tape = tape

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None: ...

    def poll(self) -> tuple[LoadEnded, ...]:
        entry = self._tape.entry
        return entry.loads if isinstance(entry, PlanMade) else ()

    def discard(self, handle: AdapterHandle) -> None: ...

    def close(self) -> None: ...


class _TapeRunner:
    """Runner whose steps end as they ended in the journal."""

    def __init__(self, capacity: Capacity, tape: _Tape) -> None:
        self._capacity = capacity
        self._tape = tape

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, plan: StepPlan) -> "_TapeStep":
        return _TapeStep(plan, self._tape)

    def close(self) -> None: ...


class _TapeStep:
    """Step of a _TapeRunner."""

    def __init__(self, plan: StepPlan, tape: _Tape) -> None:
        self._plan = plan
        self._tape = tape

    def wait(self) -> StepResult:
        entry = self._tape.entry
        if isinstance(entry, StepEnded):
            if entry.error is not None:
                raise error_from_info(entry.error)
            if entry.result is not None and entry.result.step_id == self._plan.step_id:
                return entry.result
        self._tape.differs(f"the result of step {self._plan.step_id} should be here")
        raise StepFailedError("the journal does not have it")


def _build(header: JournalHeader, tape: _Tape) -> Engine:
    try:
        return build_engine(
            _TapeRunner(header.capacity, tape),
            _TapeLoader(tape),
            _TapeClock(tape),
            header.settings,
            adapter_host_bytes=header.adapter_host_bytes,
            eviction_policy=header.eviction_policy,
            journal=tape,
            overlap=header.overlap,
        )
    except (LoraplexError, KeyError) as error:
        raise ReplayRefusedError(f"its engine cannot be built: {error}") from error


def _play_next(engine: Engine, tape: _Tape, check_every: int) -> None:
    try:
        match tape.entry:
            case CommandTaken(_, command):
                _apply(engine, command)
            case PlanMade():
                engine.step()
                steps = tape.summary.steps
                if tape.summary.difference is None and steps % check_every == 0:
                    engine.check()
            case entry:
                tape.differs(f"{_name(entry)} belongs to no step")
    except JournalError:
        raise
    except LoraplexError:
        return  # the command was refused then, too
    except Exception as error:  # a scheduler that fails is what a replay may be made for
        tape.failed(error)


def _apply(engine: Engine, command: EngineCommand) -> None:
    match command:
        case AddRequest(request):
            engine.add(request)
        case AbortRequest(request_id, sequence_index):
            engine.abort(request_id, sequence_index)
        case RegisterAdapter(source):
            engine.register_adapter(source)
        case UnregisterAdapter(digest):
            engine.forget_adapter(digest)
        case PinAdapter(_, digest):
            engine.pin_adapter(digest)
        case UnpinAdapter(digest):
            engine.unpin_adapter(digest)
        case PreloadAdapter(digest):
            engine.preload(digest)


def _problem(expected: JournalEntry | None, entry: JournalEntry) -> str:
    if isinstance(expected, PlanMade) and isinstance(entry, PlanMade):
        if expected.plan is None or entry.plan is None:
            return "a step was launched" if expected.plan else "no step was launched"
        return f"step {expected.plan.step_id} is planned otherwise"
    return f"{_name(expected)} was next, the engine has {_name(entry)}"


def _name(entry: JournalEntry | None) -> str:
    return "nothing" if entry is None else f"a {type(entry).__struct_config__.tag}"
