"""Pending steps: plans in flight, with the sequences of their rows."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

from loraplex.core.plan import RowStep, StepPlan
from loraplex.scheduling.request import Sequence
from loraplex.scheduling.state import SchedulerState


@dataclasses.dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched, and whose result has not been absorbed."""

    plan: StepPlan
    sequences: list[Sequence]
    """Sequences of the plan's rows, in their order."""
    num_tokens: int
    """Number of tokens of its rows and of what encoders read."""
    num_preempted: int
    offloaded: list[Sequence]
    """Sequences whose KV the step copies to the host."""


class PendingSteps:
    """In-flight steps, in launch order; they end in this order.

    Invariant: a sequence's `num_pending_steps` is the number of steps with a row of it.
    """

    def __init__(self, state: SchedulerState, *, num_stages: int, overlap: bool) -> None:
        """num_stages: stages of the runner's pipeline. overlap: one more step may be in flight."""
        self._state = state
        self.is_pipelined = num_stages > 1
        self.max_steps = num_stages + overlap
        self._steps: list[PendingStep] = []

    def __len__(self) -> int:
        return len(self._steps)

    def rows(self) -> Iterator[tuple[RowStep, Sequence]]:
        """Yield the rows in flight, in launch order."""
        for step in self._steps:
            yield from zip(step.plan.rows, step.sequences, strict=True)

    def find(self, plan: StepPlan) -> PendingStep:
        """Return the step of a plan that is in flight."""
        for step in self._steps:
            if step.plan is plan:
                return step
        raise AssertionError(f"plan {plan.step_id} is not in flight")

    def launch(self, step: PendingStep) -> None:
        """Add a step."""
        assert len(self._steps) < self.max_steps, "too many plans are in flight"
        for sequence in step.sequences:
            sequence.num_pending_steps += 1
        self._steps.append(step)

    def end(self, plan: StepPlan) -> PendingStep:
        """Remove the oldest step, which must be this plan's, and release what waited for it."""
        step = self._steps.pop(0)
        assert step.plan is plan, "steps end in their launch order"
        for sequence in step.sequences:
            self._state.end_step(sequence)
        return step

    def num_rows(self) -> Counter[Sequence]:
        """Return how many steps have a row of each sequence."""
        return Counter(sequence for step in self._steps for sequence in step.sequences)
