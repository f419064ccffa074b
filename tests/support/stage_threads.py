"""Stages of a pipeline in threads of one process, with queues between them."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.plan import Capacity, RowResult, StepPlan, StepResult
from loraplex.engine.runner import Runner, StepHandle
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.stages import StageLinks
from loraplex.models.stages import PipelineStage
from support.fake_loader import FakeLoad

_SECONDS = 120.0
"""Maximum time that a stage waits for another one, on a slow machine."""


class QueueLinks:
    """Implements StageLinks."""

    def __init__(
        self,
        stage: PipelineStage,
        hidden: Sequence["queue.SimpleQueue[torch.Tensor]"],
        rows: Sequence["queue.SimpleQueue[list[RowResult]]"],
    ) -> None:
        """hidden: what each stage receives from the one before; rows: from the last one."""
        self.stage = stage
        self._hidden = hidden
        self._rows = rows

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self._hidden[self.stage.index + 1].put(hidden.clone())

    def receive_hidden(self, num_tokens: int) -> torch.Tensor:
        hidden = self._hidden[self.stage.index].get(timeout=_SECONDS)
        assert len(hidden) == num_tokens
        return hidden

    def send_rows(self, rows: Sequence[RowResult]) -> None:
        for received in self._rows[: self.stage.index]:
            received.put(list(rows))

    def receive_rows(self) -> list[RowResult]:
        return self._rows[self.stage.index].get(timeout=_SECONDS)

    def close(self) -> None: ...


def queue_links(num_stages: int) -> list[StageLinks]:
    """Return connected links, one for each stage."""
    hidden = [queue.SimpleQueue[torch.Tensor]() for _ in range(num_stages)]
    rows = [queue.SimpleQueue[list[RowResult]]() for _ in range(num_stages)]
    return [
        QueueLinks(PipelineStage(index, num_stages), hidden, rows) for index in range(num_stages)
    ]


class StageThreads:
    """Implements engine.runner.Runner: the first stage in the caller's thread, as in an engine.

    All stages get the same calls in the same order, and must have the same results.
    """

    def __init__(self, runners: Sequence[Runner], capacity: Capacity) -> None:
        self._first = runners[0]
        self._capacity = capacity
        self._others = [_StageThread(runner) for runner in runners[1:]]

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, plan: StepPlan) -> "_Step":
        for other in self._others:
            other.commands.put(plan)
        return _Step(plan.step_id, self._first.launch(plan), self._others)

    def close(self) -> None:
        for other in self._others:
            other.commands.put(None)
            other.thread.join()
        self._first.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    step_id: int
    own: StepHandle
    others: Sequence["_StageThread"]

    def wait(self) -> StepResult:
        for other in self.others:
            other.commands.put(self.step_id)
        result = self.own.wait()
        for other in self.others:
            theirs = other.results.get(timeout=_SECONDS)
            if isinstance(theirs, Exception):
                raise theirs
            assert (theirs.rows, theirs.copies_done) == (result.rows, result.copies_done)
        return result


class _StageThread:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.commands: queue.SimpleQueue[StepPlan | int | None] = queue.SimpleQueue()
        """A plan to launch, the id of a step to wait for, or the end."""
        self.results: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        steps: dict[int, StepHandle] = {}
        while (command := self.commands.get()) is not None:
            try:
                if isinstance(command, StepPlan):
                    steps[command.step_id] = self._runner.launch(command)
                else:
                    self.results.put(steps.pop(command).wait())
            except Exception as error:  # the caller's test reports it
                self.results.put(error)
        self._runner.close()


class StagedLoader:
    """Implements engine.runner.AdapterLoader: gives adapters to all stages at once."""

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        hosts: Sequence[HostAdapters],
        make: Callable[[AdapterSource], HostAdapter],
    ) -> None:
        self._stages = list(zip(runners, hosts, strict=True))
        self._make = make
        self._loaded: list[FakeLoad] = []

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        for runner, host in self._stages:
            host[handle] = runner.prepare_adapter(self._make(source))
        self._loaded.append(FakeLoad(handle))

    def poll(self) -> list[FakeLoad]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def discard(self, handle: AdapterHandle) -> None:
        for _, host in self._stages:
            host.pop(handle, None)

    def close(self) -> None: ...


def staged(
    parts: Sequence[RunnerParts], make: Callable[[AdapterSource], HostAdapter]
) -> tuple[StageThreads, StagedLoader]:
    """Return a runner and a loader of these stages."""
    runners = [ModelRunner(of_stage) for of_stage in parts]
    hosts = [of_stage.host_adapters for of_stage in parts]
    return StageThreads(runners, parts[0].capacity), StagedLoader(runners, hosts, make)
