"""Lets steps run in a thread of their own: the next one is planned and prepared meanwhile."""

import queue
import threading

from loraplex.core.errors import StepFailedError
from loraplex.core.plan import Capacity, StepPlan, StepResult
from loraplex.execution.steps.model_runner import ModelRunner, PreparedStep


class ThreadedRunner:
    """Implements engine.runner.Runner around a ModelRunner: `launch` prepares, and returns.

    Steps run one after the other. Steps that were launched before the failure of an
    earlier one was reported fail without being computed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps: queue.SimpleQueue[ThreadedStep | None] = queue.SimpleQueue()
        self._num_failures_reported = 0
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def capacity(self) -> Capacity:
        return self._runner.capacity()

    def launch(self, plan: StepPlan) -> "ThreadedStep":
        step = ThreadedStep(self, self._runner.prepare(plan), self._num_failures_reported)
        self._steps.put(step)
        return step

    def close(self) -> None:
        """After the steps that were launched."""
        self._steps.put(None)
        self._thread.join()
        self._runner.close()

    def report(self, num_failures: int) -> None:
        """Note that the plans of later steps account for this number of failures."""
        self._num_failures_reported = max(self._num_failures_reported, num_failures)

    def _run(self) -> None:
        num_failures = 0
        while (step := self._steps.get()) is not None:
            if step.num_failures_known < num_failures:
                step.fail(StepFailedError("the step before it failed"), num_failures)
                continue
            try:
                step.end(self._runner.run(step.prepared).wait())
            except Exception as error:
                num_failures += 1
                step.fail(error, num_failures)


class ThreadedStep:
    """Implements engine.runner.StepHandle."""

    def __init__(
        self, runner: ThreadedRunner, prepared: PreparedStep, num_failures_known: int
    ) -> None:
        self.prepared = prepared
        self.num_failures_known = num_failures_known
        self._runner = runner
        self._has_ended = threading.Event()
        self._result: StepResult | None = None
        self._failure: tuple[Exception, int] | None = None

    def end(self, result: StepResult) -> None:
        """Called by the thread that computes; or `fail`."""
        self._result = result
        self._has_ended.set()

    def fail(self, error: Exception, num_failures: int) -> None:
        """num_failures: of steps so far."""
        self._failure = (error, num_failures)
        self._has_ended.set()

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def wait(self) -> StepResult:
        self._has_ended.wait()
        if self._failure is not None:
            error, num_failures = self._failure
            self._runner.report(num_failures)
            raise error
        assert self._result is not None
        return self._result
