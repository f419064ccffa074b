"""Steps in a thread of their own: in order, and a failure takes along what was made without it."""

import threading
import time

import pytest

from loraplex.core.errors import StepFailedError
from loraplex.core.plan import StepPlan, StepResult
from loraplex.execution.steps.threaded_runner import ThreadedRunner

PATIENCE_SECONDS = 60


class GatedRunner:
    """Computes a step when its gate is open, and fails those that are named."""

    def __init__(self, failing=()):
        self.failing = set(failing)
        self.gate = threading.Event()
        self.prepared = []
        self.computed = []
        self.threads = set()
        self.is_closed = False

    def capacity(self):
        return "capacity"

    def prepare(self, plan):
        self.prepared.append(plan.step_id)
        return plan

    def run(self, plan):
        assert self.gate.wait(PATIENCE_SECONDS)
        self.computed.append(plan.step_id)
        self.threads.add(threading.current_thread())
        return GatedStep(plan.step_id, plan.step_id in self.failing)

    def close(self):
        self.is_closed = True


class GatedStep:
    def __init__(self, step_id, fails):
        self.step_id, self.fails = step_id, fails

    def wait(self):
        if self.fails:
            raise StepFailedError(f"step {self.step_id} failed")
        return StepResult(self.step_id)


def threaded(*failing):
    inner = GatedRunner(failing)
    return inner, ThreadedRunner(inner)


def test_launch_returns_before_the_step_runs():
    inner, runner = threaded()
    steps = [runner.launch(StepPlan(number)) for number in (1, 2, 3)]
    assert (inner.prepared, inner.computed) == ([1, 2, 3], [])
    inner.gate.set()
    assert [step.wait().step_id for step in steps] == [1, 2, 3] == inner.computed
    assert threading.main_thread() not in inner.threads
    assert len(inner.threads) == 1
    runner.close()


def test_what_is_behind_a_failed_step_is_not_computed():
    inner, runner = threaded(1, 4)
    first, behind = (runner.launch(StepPlan(number)) for number in (1, 2))
    inner.gate.set()
    with pytest.raises(StepFailedError, match="step 1 failed"):
        first.wait()
    with pytest.raises(StepFailedError, match="the step before it failed"):
        behind.wait()
    assert runner.launch(StepPlan(3)).wait().step_id == 3
    assert inner.computed == [1, 3]
    with pytest.raises(StepFailedError, match="step 4 failed"):
        runner.launch(StepPlan(4)).wait()
    assert runner.launch(StepPlan(5)).wait().step_id == 5
    runner.close()


def test_a_step_launched_after_a_failure_that_was_not_reported_is_not_computed():
    inner, runner = threaded(1)
    inner.gate.set()
    first = runner.launch(StepPlan(1))
    while not first.has_ended:
        time.sleep(0.001)
    behind = runner.launch(StepPlan(2))
    with pytest.raises(StepFailedError, match="the step before it failed"):
        behind.wait()
    assert inner.computed == [1]
    runner.close()


def test_an_error_that_is_no_step_error_reaches_wait():
    inner, runner = threaded()

    def run(plan):
        raise ZeroDivisionError(plan.step_id)

    inner.run = run
    with pytest.raises(ZeroDivisionError):
        runner.launch(StepPlan(1)).wait()
    runner.close()


def test_close_waits_for_what_was_launched():
    inner, runner = threaded()
    step = runner.launch(StepPlan(1))
    inner.gate.set()
    runner.close()
    assert inner.is_closed
    assert step.wait().step_id == 1
    assert runner.capacity() == "capacity"
