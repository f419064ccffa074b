"""Real engines of one model: plain ones, and ones under random conditions."""

import dataclasses
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from loraplex.core.errors import StepFailedError
from loraplex.core.plan import Capacity, Slot
from loraplex.core.request import EngineRequest
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.engine import Engine, build_engine
from loraplex.engine.journal import Journal
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.grammar.rows import GrammarRows
from loraplex.execution.sampling.sampler import Sampler
from loraplex.execution.steps.launched_step import StepWork
from loraplex.execution.steps.model_runner import ModelRunner, PreparedStep
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.threaded_runner import ThreadedRunner
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.memory.adapter_pages import place
from loraplex.models.spec import ModelSpec
from loraplex.testing.fake_clock import FakeClock
from support.fake_loader import FakeLoad
from support.grammar_tokens import vocabulary
from support.random_conditions import FAILING_FIELDS, Conditions
from support.random_schedules import RandomAdapters

RANKS = (4, 8, 3)
"""Number of pages of the adapters."""
PLANNED_FAILURE = StepFailedError("it was to fail")
Failures = Collection[tuple[str, int]]
"""Failures as in Conditions.failures."""
_LARGE = 1 << 30
_LATE_MASKS = 0.3


class FeatureEngines:
    """Engines that share memory, so one at a time: data left by one must not affect the next."""

    def __init__(self, parts: RunnerParts, kernels: Kernels | None = None) -> None:
        """parts.sampler is not used; parts.host_adapters is filled. kernels: of the sampler; None
        are the device's own.
        """
        self._parts = parts
        self._kernels = kernels or select_kernels(parts.device)
        self.sources = self._loader(random.Random(0)).sources
        geometry = parts.capacity.page_geometry
        self._num_pages = {s.digest: place(s.targets, geometry).num_pages for s in self.sources}
        host_page_bytes = parts.capacity.host_page_bytes
        self._num_bytes = {
            s.digest: self._num_pages[s.digest] * host_page_bytes or s.num_bytes
            for s in self.sources
        }

    def plain(self, clock: FakeClock, logits_dir: Path) -> Engine:
        """Return an engine without sharing, drafts or planning ahead, and with enough memory."""
        runner = self._runner(self._parts.capacity, logits_dir, fast_forward=False)
        settings = SchedulerSettings(enable_prefix_cache=False)
        loader = self._loader(random.Random(0))
        return self._known(build_engine(runner, loader, clock, settings, adapter_host_bytes=_LARGE))

    def under(
        self,
        conditions: Conditions,
        requests: Sequence[EngineRequest],
        clock: FakeClock,
        logits_dir: Path,
        journal: Journal | None,
        failures: Failures,
    ) -> Engine:
        """Return an engine that is just large enough for each request alone, or larger."""
        uses = [[use.digest for use in request.adapters] for request in requests]
        uses += [[source.digest] for source in self.sources]  # each is refused if it cannot fit
        most_pages = max(sum(map(self._num_pages.__getitem__, digests)) for digests in uses)
        most_bytes = max(sum(map(self._num_bytes.__getitem__, digests)) for digests in uses)
        capacity = conditions.capacity(self._parts.capacity, requests, most_pages)
        runner = self._runner(
            capacity,
            logits_dir,
            fast_forward=conditions.fast_forward,
            late_masks=_LATE_MASKS,
            failures=failures,
        )
        needs_thread = conditions.overlap or conditions.num_stages > 1
        runs_in_launch = self._parts.accelerator is None
        engine = build_engine(
            ThreadedRunner(runner) if needs_thread and runs_in_launch else runner,
            self._loader(random.Random(f"loads {conditions.seed}")),
            clock,
            conditions.settings_for(requests),
            adapter_host_bytes=most_bytes if conditions.small_adapter_host else _LARGE,
            eviction_policy=conditions.eviction_policy,
            journal=journal,
            overlap=conditions.overlap,
        )
        return self._known(engine)

    def _known(self, engine: Engine) -> Engine:
        for source in self.sources:
            engine.register_adapter(source)
        return engine

    def _loader(self, draws: random.Random) -> "_LateAdapters":
        parts = self._parts
        adapters = _LateAdapters(parts.host_adapters, parts.decoder.spec, draws)
        adapters.prepare = parts.adapter_bank.prepare
        return adapters

    def _runner(
        self,
        capacity: Capacity,
        logits_dir: Path,
        *,
        fast_forward: bool,
        late_masks: float = 0.0,
        failures: Failures = (),
    ) -> "_FailingRunner":
        parts, vocab_size = self._parts, capacity.vocab_size
        while parts.adapter_bank.arrived(wait=True):
            pass  # of an engine that is dead
        sampler = Sampler(
            vocab_size,
            device=parts.device,
            kernels=self._kernels,
            grammars=_SlowGrammars(vocab_size, late_masks, fast_forward=fast_forward),
            logits_dir=logits_dir,
        )
        parts = dataclasses.replace(parts, capacity=capacity, sampler=sampler)
        runner = _FailingRunner(parts, failures)
        runner.forget_steps()
        runner.record_steps()
        return runner


class _LateAdapters(RandomAdapters):
    """Loads end at random."""

    def __init__(self, host: HostAdapters, config: ModelSpec, draws: random.Random) -> None:
        super().__init__(host, config, RANKS)
        self._draws = draws
        self._late: list[FakeLoad] = []

    def poll(self) -> list[FakeLoad]:
        loads = [*self._late, *super().poll()]
        self._late = [load for load in loads if self._draws.random() < 0.5]
        return [load for load in loads if load not in self._late]


class _SlowGrammars(GrammarRows):
    """This share of the masks comes too late for its step."""

    def __init__(self, vocab_size: int, late_masks: float, *, fast_forward: bool) -> None:
        super().__init__(vocab_size, vocabulary, fast_forward=fast_forward, defers=False)
        self._late_masks = late_masks
        self._draws = random.Random(vocab_size)

    def unready(self, slots: Iterable[Slot], *, has_others: bool) -> frozenset[Slot]:
        late = {slot for slot in slots if self._draws.random() < self._late_masks}
        return super().unready(set(slots) - late, has_others=has_others) | late


class _FailingRunner(ModelRunner):
    """Some steps fail: before or after they were computed."""

    def __init__(self, parts: RunnerParts, failures: Failures) -> None:
        super().__init__(parts)
        self._failures = frozenset(failures)
        self._num_steps: Counter[str] = Counter()
        """Whether a field of the plan has entries."""

    def _execute(self, step: PreparedStep) -> StepWork:
        fields = {field for field in FAILING_FIELDS if getattr(step.plan, field)}
        self._num_steps.update(fields)
        reached = {(field, self._num_steps[field]) for field in fields}
        if not self._failures & reached:
            return super()._execute(step)
        if step.plan.step_id % 2:
            super()._execute(step)
        raise PLANNED_FAILURE
