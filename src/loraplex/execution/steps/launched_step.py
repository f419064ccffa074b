"""Steps that were launched, and of which the host does not know yet what they gave."""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from loraplex.core.errors import DeviceLost, StepFailedError
from loraplex.core.plan import StepResult

_LOGGER = logging.getLogger(__name__)


class StepWork(Protocol):
    """Work of a step that is left after its launch."""

    @property
    def is_late(self) -> bool:
        """Whether the next step can be computed only when this one has ended."""
        ...

    def finish(self) -> StepResult: ...


@dataclasses.dataclass(slots=True, eq=False)
class LaunchedStep:
    """Implements engine.runner.StepHandle."""

    step_id: int
    _wait: Callable[["LaunchedStep"], None]
    """Ends it, with all that were launched before."""
    work: StepWork | None = None
    outcome: StepResult | StepFailedError | None = None
    """None: not known yet."""
    _is_waited_for: bool = False

    @property
    def has_failed(self) -> bool:
        return isinstance(self.outcome, StepFailedError)

    @property
    def is_late(self) -> bool:
        return self.outcome is None and self.work is not None and self.work.is_late

    def fail(self, error: Exception) -> None:
        _LOGGER.error("step %d failed", self.step_id, exc_info=error)
        if not isinstance(error, StepFailedError):
            error = StepFailedError(f"step {self.step_id} failed: {error}")
        self.outcome = error
        self.work = None

    def leave_out(self) -> None:
        """The step before it failed: whatever it gave is not used."""
        self.outcome = StepFailedError("the step before it failed")
        self.work = None

    def wait(self) -> StepResult:
        if not self._is_waited_for:
            self._is_waited_for = True
            self._wait(self)
        assert self.outcome is not None, "it has ended"
        if isinstance(self.outcome, StepFailedError):
            raise self.outcome
        return self.outcome


class LaunchedSteps:
    """Steps that were launched, and not waited for. Used by one thread.

    A step that fails makes those fail that are launched before its failure is reported: their
    plans were made as if it had not failed.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        """settle: blocks until the device does nothing any more."""
        self._settle = settle
        self._steps: deque[LaunchedStep] = deque()

    def launch(self, step_id: int, start: Callable[[], StepWork]) -> LaunchedStep:
        """start: enqueues the step. It is not called if the step is to be left out."""
        step = LaunchedStep(step_id, self._wait)
        if self._steps and any(before.is_late for before in self._steps):
            for before in self._steps:
                self._end(before)
        if self._steps and any(before.has_failed for before in self._steps):
            step.leave_out()
        else:
            try:
                step.work = start()
            except Exception as error:
                self._fail(step, error)
        self._steps.append(step)
        return step

    def _wait(self, step: LaunchedStep) -> None:
        """Wait for a step, which reports its failure and those of the steps before it."""
        while self._steps:
            first = self._steps.popleft()
            self._end(first)
            if first is step:
                return

    def _end(self, step: LaunchedStep) -> None:
        if step.outcome is not None or step.work is None:
            return
        try:
            step.outcome = step.work.finish()
            step.work = None
        except Exception as error:
            self._fail(step, error)
            for behind in self._steps:
                if behind.outcome is None:
                    behind.leave_out()

    def _fail(self, step: LaunchedStep, error: Exception) -> None:
        # After the report, memory is freed that enqueued work may still read.
        try:
            self._settle()
        except Exception as problem:
            _LOGGER.error("step %d failed", step.step_id, exc_info=error)
            raise DeviceLost(f"the device does not end its work: {problem}") from problem
        step.fail(error)
