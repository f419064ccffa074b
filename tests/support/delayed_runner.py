"""Runner that computes a step only when it is waited for, as late as an asynchronous one may."""

from loraplex.core.errors import StepFailedError
from loraplex.core.plan import Capacity, RowStep, StepPlan, StepResult, Wanted
from loraplex.engine.runner import Runner


class DelayedRunner:
    """Implements engine.runner.Runner around another one, for more than one plan in flight.

    Raises AssertionError if plans are not waited for in their order, and for several stages if a
    row needs a token that a plan in flight samples.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launched: list[DelayedStep] = []

    def capacity(self) -> Capacity:
        return self._runner.capacity()

    def launch(self, plan: StepPlan) -> "DelayedStep":
        if self._runner.capacity().num_stages > 1:
            sampling = {row.slot for step in self._launched for row in step.sampling_rows}
            known = {row.slot for row in plan.rows if row.token_ids is not None}
            assert not sampling & {row.slot for row in plan.rows} - known, "an unknown token"
        step = DelayedStep(self, plan)
        self._launched.append(step)
        return step

    def close(self) -> None:
        self._runner.close()

    def compute(self, step: "DelayedStep") -> StepResult:
        """Called once for each step."""
        assert self._launched.pop(0) is step, "plans are waited for in their order"
        if step.is_void:
            raise StepFailedError(f"step {step.plan.step_id} was not computed")
        try:
            return self._runner.launch(step.plan).wait()
        except Exception:
            for behind in self._launched:
                behind.is_void = True
            raise


class DelayedStep:
    """Implements engine.runner.StepHandle."""

    def __init__(self, runner: DelayedRunner, plan: StepPlan) -> None:
        self._runner = runner
        self.plan = plan
        self.is_void = False

    @property
    def sampling_rows(self) -> list[RowStep]:
        return [row for row in self.plan.rows if row.wanted is Wanted.LAST]

    def wait(self) -> StepResult:
        return self._runner.compute(self)
