"""Several systems, the same work, one run: who goes when, and what a failure costs.

Round after round and case after case the systems take turns, each round in another order, so that
a machine that slows down does so for all of them. All are up together, idle while another works;
or, if the machine's memory is too small for that, one at a time, started anew for every round.
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from comparison import calibration
from comparison.calibration import Calibration
from comparison.cases import Case, Load, Stage
from comparison.first_use import FirstUse, measure_first_use
from comparison.fixtures import RANK_8, RANK_64, Fixture
from comparison.fleet import Fleet
from comparison.held_streams import HeldStreams, measure_held
from comparison.journal import Checked, Journal, Measured
from comparison.processes import cpu_seconds, file_bytes, resident_bytes
from comparison.right_answers import Outputs, check, generate_alone
from comparison.sizes import STANDARD, Sizes
from comparison.systems import Adapter, Running, Setup, System, run_load
from loraplex.bench.arrivals import ClosedLoop
from loraplex.bench.machine import load_average
from loraplex.bench.popularity import BaseOnly, Distinct, Popularity
from loraplex.bench.statistics import RunStatistics
from loraplex.bench.workload import Lengths, Workload, generate
from loraplex.core.errors import LoraplexError, UnsupportedFeatureError

_WARM_UP_CLIENTS = 8
_FIRST_NEW_ADAPTER = 10_000
"""Adapters from this number on are those that no stage knows from its start."""


class Progress(Protocol):
    """Display of the progress."""

    def begin(self, num_runs: int) -> None: ...

    def say(self, line: str) -> None:
        """Print a line."""
        ...

    def doing(self, what: str) -> None: ...

    def done(self) -> None:
        """One more run is over, or need not be run again."""
        ...


@dataclasses.dataclass(slots=True)
class TimeLimits:
    """How long it may take; the budget runs from when this is made."""

    run_seconds: float
    """One run. A system that takes longer is stopped, and started again for its next one."""
    budget_seconds: float | None
    """All together: then no more run begins."""
    _start: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        budget = self.budget_seconds
        return budget is not None and time.monotonic() - self._start > budget


class Comparison:
    """Results go into the journal; what is in it already is not run again."""

    def __init__(
        self,
        systems: Sequence[System],
        fixture: Fixture,
        journal: Journal,
        *,
        limits: TimeLimits,
        progress: Progress,
        work: Path,
        reference: System | None = None,
        sizes: Sizes = STANDARD,
    ) -> None:
        """work: a folder for logs and for what systems need while they run.
        reference: the system whose outputs alone are those that 32-bit systems must give.
        """
        self._systems = systems
        self._fixture = fixture
        self._journal = journal
        self._settings = journal.header.settings
        self._limits = limits
        self._progress = progress
        self._work = work
        self._sizes = sizes
        self._reference = reference
        self._reference_outputs: list[Outputs] | None = None

    async def run(self, stages: Sequence[Stage]) -> None:
        """Raises ConfigError if the fixture cannot be written; nothing else ends it early."""
        await self._choose_variants()
        num_cases = sum(len(stage.cases) for stage in stages)
        self._progress.begin(num_cases * len(self._systems) * self._settings.rounds)
        for stage in stages:
            setup = await asyncio.to_thread(self._setup, stage)
            fleet = Fleet(
                stage.name,
                setup,
                self._work,
                self._journal,
                measures_starts=self._sizes.is_short and self._settings.is_restarting,
            )
            try:
                await self._run_stage(stage, fleet)
            finally:
                await fleet.stop_others(None)

    async def _choose_variants(self) -> None:
        """Replace each system by its fastest variant; the journal has what was tried before."""
        setup = await asyncio.to_thread(self._setup, calibration.STAGE)
        vocabulary, seed = self._fixture.vocabulary, self._settings.seed
        trials = Calibration(
            setup,
            vocabulary,
            self._work,
            self._journal,
            seed,
            sizes=self._sizes,
            variants=self._settings.variants,
        )
        for system in self._systems:
            for name, variant in trials.untried(system).items():
                if self._limits.is_over:
                    return
                self._progress.doing(f"calibration, {system.name}, {name}")
                await trials.try_out(name, variant, self._limits.run_seconds)
        chosen = {system.name: trials.best(system) for system in self._systems}
        self._systems = [*chosen.values()]
        if self._reference is not None:
            self._reference = chosen.get(self._reference.name, self._reference)

    async def _run_stage(self, stage: Stage, fleet: Fleet) -> None:
        for number, case, system in self._turns(stage):
            if self._limits.is_over:
                return
            found = self._journal.measured(system.name, stage.name, case.name, number)
            # What failed before is tried again by the next call with the same journal.
            if found is None or not found.is_good:
                self._progress.doing(f"{case.name}, {system.name}")
                run = Measured(system=system.name, stage=stage.name, case=case.name, round=number)
                self._journal.add(await self._run_one(run, stage, case, system, fleet))
            self._progress.done()

    def _turns(self, stage: Stage) -> Iterator[tuple[int, Case, System]]:
        for number in range(self._settings.rounds):
            first = number % len(self._systems)
            order = [*self._systems[first:], *self._systems[:first]]
            if self._settings.is_restarting:
                yield from ((number, case, system) for system in order for case in stage.cases)
            else:
                yield from ((number, case, system) for case in stage.cases for system in order)

    async def _run_one(
        self, run: Measured, stage: Stage, case: Case, system: System, fleet: Fleet
    ) -> Measured:
        """The finished run. Whatever goes wrong is its error, and costs no other system a run."""
        try:
            running = await self._ready(stage, system, fleet)
            verdict = self._journal.verdict(system.name, stage.name)
            if verdict is not None and not verdict.is_right and case.uses_adapters:
                return _failed(run, f"not timed, its outputs are wrong: {verdict.problems[0]}")
            await fleet.settle()
            async with asyncio.timeout(self._limits.run_seconds):
                done = await self._measure(run, case, running)
        except UnsupportedFeatureError as error:
            return _failed(run, error.message)
        except TimeoutError:
            await fleet.stop_failed(system)
            return _failed(run, f"not done within {self._limits.run_seconds:g} seconds")
        except Exception as error:  # a peer's: others shall go on, whatever it is
            await fleet.stop_failed(system)
            return _failed(run, _reason(error))
        if done.figures is not None and done.figures.num_failed == done.figures.num_requests:
            await fleet.stop_failed(system)
        return done

    async def _ready(self, stage: Stage, system: System, fleet: Fleet) -> Running:
        """The system, up, checked and warm."""
        if self._settings.is_restarting:
            await fleet.stop_others(system)
        running = fleet.find(system)
        if running is not None and fleet.is_prepared(system):
            return running
        can_check = stage.num_adapters >= self._sizes.check.num_adapters
        needs_check = can_check and self._journal.verdict(system.name, stage.name) is None
        if needs_check and system.weight_bits == 32:
            await self._run_reference(fleet)
        running = fleet.find(system) or await fleet.start(system)
        async with asyncio.timeout(self._limits.run_seconds):
            if needs_check:
                verdict, _ = await check(
                    running,
                    self._fixture.vocabulary,
                    system.weight_bits,
                    self._reference_outputs,
                    self._sizes.check,
                )
                self._journal.add(Checked(system=system.name, stage=stage.name, verdict=verdict))
            for load in _warm_up(stage, self._sizes, self._settings.seed):
                await self._run_load(running, load, repeat=0)
        fleet.set_prepared(system)
        return running

    async def _run_reference(self, fleet: Fleet) -> None:
        """Keep the reference's outputs, if they are not there yet and it runs."""
        if self._reference is None or self._reference_outputs is not None:
            return
        try:
            running = fleet.find(self._reference) or await fleet.start(self._reference)
            async with asyncio.timeout(self._limits.run_seconds):
                self._reference_outputs = await generate_alone(
                    running, self._fixture.vocabulary, self._sizes.check
                )
        except Exception:  # without it there is less to compare with, which the report mentions
            await fleet.stop_failed(self._reference)
        if self._settings.is_restarting:
            await fleet.stop_others(None)

    async def _measure(self, run: Measured, case: Case, running: Running) -> Measured:
        load_before = load_average()
        busy_before, counts_before = cpu_seconds(running.process_ids), await running.counters()
        first_use = figures = held = None
        if isinstance(case.load, FirstUse):
            adapter = await asyncio.to_thread(self._new_adapter, case.load, run.round)
            first_use = await measure_first_use(
                running, adapter, self._fixture.vocabulary, is_known=case.load.is_known
            )
        elif isinstance(case.load, HeldStreams):
            vocabulary, seed = self._fixture.vocabulary, self._settings.seed
            held = await measure_held(
                running, case.load, vocabulary, seed=seed, repeat=run.round + 1
            )
        else:
            # Repeat 0 is the warm-up's.
            figures = await self._run_load(running, case.load, repeat=run.round + 1)
        loads = (await running.counters()).get("adapter_loads")
        return msgspec.structs.replace(
            run,
            figures=figures,
            first_use=first_use,
            held=held,
            resident_bytes=await asyncio.to_thread(resident_bytes, running.process_ids),
            file_bytes=await asyncio.to_thread(file_bytes, running.process_ids),
            cpu_seconds=cpu_seconds(running.process_ids) - busy_before,
            adapter_loads=None if loads is None else loads - counts_before["adapter_loads"],
            load_average=load_before,
        )

    async def _run_load(self, running: Running, load: Load, repeat: int) -> RunStatistics:
        vocabulary = self._fixture.vocabulary
        if isinstance(load, Workload):
            requests = generate(load, repeat, vocabulary)
        else:
            requests = load.generate(repeat, vocabulary)
        return await run_load(running, requests, load.concurrency)

    def _new_adapter(self, load: FirstUse, number: int) -> Adapter:
        kind = RANK_8 if load.rank == RANK_8.rank else RANK_64
        first = _FIRST_NEW_ADAPTER + 2 * number + load.is_known
        return self._fixture.adapters(kind, 1, first=first)[0]

    def _setup(self, stage: Stage) -> Setup:
        self._fixture.ensure_model()
        return Setup(
            model=self._fixture.model,
            tokens=self._fixture.tokens,
            adapters=self._fixture.adapters(RANK_8, stage.num_adapters),
            num_resident_adapters=stage.num_resident,
            max_lora_rank=stage.max_lora_rank,
            max_num_seqs=self._sizes.max_num_seqs,
            max_model_len=self._sizes.max_model_len,
            num_threads=self._settings.num_threads,
            cache=self._fixture.converted,
            work=self._work,
            log=self._work / "log",
            gguf_file=self._fixture.gguf_file if self._fixture.shape.writes_gguf else None,
        )


def _failed(run: Measured, error: str) -> Measured:
    return msgspec.structs.replace(run, error=error)


def _reason(error: Exception) -> str:
    """What went wrong, in a line; of several errors that tasks had at once, the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error.message if isinstance(error, LoraplexError) else f"{type(error).__name__}: {error}"


def _warm_up(stage: Stage, sizes: Sizes, seed: int) -> Iterator[Workload]:
    """Some requests to the base, and one to every adapter unless memory is too small for them."""
    count, prompt, output = sizes.warm_up
    yield _workload(BaseOnly(), count, Lengths(prompt, prompt), output, seed)
    if 0 < stage.num_adapters <= stage.num_resident:
        prompt, output = sizes.warm_up_adapter
        yield _workload(Distinct(), stage.num_adapters, Lengths(prompt, prompt), output, seed)


def _workload(
    popularity: Popularity, count: int, prompt_tokens: Lengths, output_tokens: int, seed: int
) -> Workload:
    return Workload(
        num_requests=count,
        prompt_tokens=prompt_tokens,
        output_tokens=Lengths(output_tokens, output_tokens),
        popularity=popularity,
        num_adapters=count,
        arrivals=ClosedLoop(_WARM_UP_CLIENTS),
        seed=seed,
    )
