"""Checks a backend's ops in processes of their own, which may crash or hang.

What an op does to its process, and to the device's context in it, ends with the process. The next
one has torch's in place of that op, so a check ends after as many processes as there are such ops.
"""

import contextlib
import dataclasses
import logging
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from loraplex.core.environment import child_environment
from loraplex.core.python_process import module_command
from loraplex.core.stopped_process import how_it_ended
from loraplex.execution.checking.process import (
    STARTING,
    Began,
    CheckRequest,
    Completed,
    Event,
    Fell,
    NotChecked,
    Tuned,
)
from loraplex.execution.checking.tuning import Tuning
from loraplex.execution.checking.verdict import Finding
from loraplex.kernels.shadow import Fault

logger = logging.getLogger(__name__)

_MODULE: Final = "loraplex.execution.checking.process"
_START_SECONDS: Final = 300.0
_OP_SECONDS: Final = 90.0
"""An op's first call compiles it."""
_END_SECONDS: Final = 5.0
_READ_BYTES: Final = 1 << 16


class CheckFailed(Exception):
    """Nothing can be said about the ops."""


class _TooLate(Exception):
    """No event came in time."""


def patience(op: str) -> float:
    """Return the seconds that an op may take, or a start."""
    return _START_SECONDS if op == STARTING else _OP_SECONDS


class CheckResult(NamedTuple):
    """What processes of a check found."""

    findings: tuple[Finding, ...]
    """What is known of each op that the model calls."""
    tuning: Tuning = Tuning()


def check_ops(request: CheckRequest, patience: Callable[[str], float] = patience) -> CheckResult:
    """Check each op that the model calls, and measure sizes if that is requested.

    Raises CheckFailed.

    patience: seconds, by the op that runs.
    """
    fallen: dict[str, Finding] = {}
    while True:
        again = msgspec.structs.replace(request, fallen=(*request.fallen, *fallen))
        run = _Run(again)
        completed = run.watch(patience)
        new = {op: finding for op, finding in run.fallen.items() if op not in fallen}
        fallen |= new
        if completed is not None:
            passed = [
                Finding(op=op, num_calls=count, difference=completed.differences[op])
                for op, count in completed.calls.items()
                if op not in fallen
            ]
            findings = sorted((*passed, *fallen.values()), key=lambda finding: finding.op)
            return CheckResult(tuple(findings), run.tuning)
        if not new:
            raise CheckFailed(f"a process of the check {run.end}, after {run.op or 'its start'}")


@dataclasses.dataclass
class _Run:
    """One process of a check."""

    request: CheckRequest
    op: str = STARTING
    """The one that runs."""
    end: str = ""
    """How the process ended."""
    fallen: dict[str, Finding] = dataclasses.field(default_factory=dict)
    completed: Completed | None = None
    """The end of the check of ops."""
    tuning: Tuning = dataclasses.field(default_factory=Tuning)

    def watch(self, patience: Callable[[str], float]) -> Completed | None:
        """Return the end of a whole check; None: an op ended the process, or hung in it.

        Raises CheckFailed.
        """
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            module_command(_MODULE, str(write_end)),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_end,),
        )
        os.close(write_end)
        try:
            assert process.stdin is not None
            # A process that has ended reads nothing: its events end, too.
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(self.request))
            for event in _events(read_end, lambda: patience(self.op)):
                match event:
                    case Began(op=op):
                        self.op = op
                    case Fell(op=op, fault=fault, detail=detail):
                        self.fallen[op] = Finding(op=op, fault=fault, detail=detail)
                    case NotChecked(reason=reason):
                        if self.completed is None:
                            raise CheckFailed(reason)
                        self.tuning = Tuning(not_done=reason)
                        return self.completed
                    case Completed():
                        self.completed = event
                        if not self.request.tunes:
                            return event
                    case Tuned(tuning=tuning):
                        self.tuning = tuning
                        return self.completed
            self.end = how_it_ended(_status(process))
            self._falls(Fault.CRASHES, f"the process {self.end}")
        except _TooLate:
            self.end = f"did nothing for {patience(self.op):g} seconds"
            self._falls(Fault.HANGS, self.end)
        finally:
            os.close(read_end)
            process.kill()
            _status(process)
        return self.completed

    def _falls(self, fault: Fault, detail: str) -> None:
        """Blame the op that ran, unless the process named one that ended it.

        Of a tuning nothing is used then: the ops were checked with our own sizes.
        """
        if self.completed is not None:
            what = self.op or "the start of the measurement"
            self.tuning = Tuning(not_done=f"{what} {fault}: {detail}")
            return
        is_named = any(finding.fault is Fault.CRASHES for finding in self.fallen.values())
        if self.op != STARTING and not is_named:
            self.fallen.setdefault(self.op, Finding(op=self.op, fault=fault, detail=detail))


def _events(descriptor: int, seconds: Callable[[], float]) -> Iterator[Event]:
    """Yield events until the process ends. Raises _TooLate if none comes for so many seconds."""
    decoder, rest = msgspec.json.Decoder(Event), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            allowed = seconds()
            deadline = time.monotonic() + allowed
            while not selector.select(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise _TooLate
            received = os.read(descriptor, _READ_BYTES)
            if not received:
                return
            *lines, rest = (rest + received).split(b"\n")
            yield from map(decoder.decode, lines)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return how the process ended; None: it does not, as one that waits in a driver."""
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("process %d of a check of kernels does not end", process.pid)
        return None
