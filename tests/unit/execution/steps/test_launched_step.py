"""Steps in flight: ended in their order, and a failure takes along what was made without it."""

from collections.abc import Callable

import pytest

from loraplex.core.errors import DeviceLost, StepFailedError
from loraplex.core.plan import StepResult
from loraplex.execution.steps.launched_step import LaunchedStep, LaunchedSteps


class Work:
    def __init__(self, log: list[str], step_id: int, *, is_late: bool, fails: bool) -> None:
        self.log, self.step_id, self.is_late, self.fails = log, step_id, is_late, fails

    def finish(self) -> StepResult:
        self.log.append(f"end {self.step_id}")
        if self.fails:
            raise ZeroDivisionError(self.step_id)
        return StepResult(self.step_id)


class Driver:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.steps = LaunchedSteps(lambda: self.log.append("settle"))

    def launch(
        self, step_id: int, *, late: bool = False, fails: bool = False, starts: bool = True
    ) -> LaunchedStep:
        return self.steps.launch(step_id, self._start(step_id, late, fails, starts))

    def _start(self, step_id: int, late: bool, fails: bool, starts: bool) -> Callable[[], Work]:
        def start() -> Work:
            self.log.append(f"start {step_id}")
            if not starts:
                raise ZeroDivisionError(step_id)
            return Work(self.log, step_id, is_late=late, fails=fails)

        return start


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_step_may_start_before_the_one_before_it_has_ended(driver: Driver) -> None:
    first, second = driver.launch(1), driver.launch(2)
    assert first.wait().step_id == first.wait().step_id == 1
    third = driver.launch(3)
    assert [second.wait().step_id, third.wait().step_id] == [2, 3]
    assert driver.log == ["start 1", "start 2", "end 1", "start 3", "end 2", "end 3"]


def test_what_the_host_must_end_is_ended_before_the_next_starts(driver: Driver) -> None:
    steps = [driver.launch(1), driver.launch(2, late=True), driver.launch(3)]
    assert driver.log == ["start 1", "start 2", "end 1", "end 2", "start 3"]
    assert [step.wait().step_id for step in steps] == [1, 2, 3]


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_failure_takes_along_what_was_launched_before_its_report(
    driver: Driver, late: bool, starts: bool
) -> None:
    first = driver.launch(1, late=late, fails=True, starts=starts)
    behind = driver.launch(2)
    with pytest.raises(StepFailedError, match="step 1 failed: 1"):
        first.wait()
    with pytest.raises(StepFailedError, match="the step before it failed"):
        behind.wait()
    assert driver.launch(3).wait().step_id == 3
    assert "end 2" not in driver.log
    assert ("start 2" in driver.log) == (starts and not late)
    assert driver.log.index("settle") < driver.log.index("start 3")


def test_a_failure_that_was_reported_takes_nothing_along(driver: Driver) -> None:
    with pytest.raises(StepFailedError):
        driver.launch(1, fails=True).wait()
    assert driver.launch(2).wait().step_id == 2


def test_a_device_that_does_not_settle_is_lost(driver: Driver, caplog) -> None:
    def settle() -> None:
        raise RuntimeError("CUDA error")

    driver.steps = LaunchedSteps(settle)
    with pytest.raises(DeviceLost, match="CUDA error"):
        driver.launch(1, starts=False)
    with pytest.raises(DeviceLost, match="CUDA error"):
        driver.launch(2, fails=True).wait()
    causes = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert causes == [ZeroDivisionError, ZeroDivisionError]
