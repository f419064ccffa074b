"""Which of a system's documented settings of threads is the fastest here: tried before it is timed.

A variant runs alone, without adapters, on short forms of W1 and W2-8. The best one is that with the
largest geometric mean of both medians. A system with one variant is not tried.
"""

import asyncio
import statistics
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from comparison.cases import Stage
from comparison.fleet import Fleet
from comparison.journal import Calibrated, Journal
from comparison.sizes import STANDARD, Sizes
from comparison.systems import Running, Setup, System, run_load
from loraplex.bench.arrivals import Burst
from loraplex.bench.popularity import BaseOnly
from loraplex.bench.workload import Lengths, Workload, generate
from loraplex.core.errors import LoraplexError

STAGE = Stage(name="calibration", num_adapters=0, num_resident=8, max_lora_rank=8, cases=())
_NUM_STREAMS = {"W1": 1, "W2-8": 8}
_SECONDS = 6.0
"""After this time no more round of a variant begins."""


def best_variant(entries: Iterable[Calibrated], system: str) -> str | None:
    """Return the fastest variant of a system; None if none has been measured."""
    rates = {
        entry.variant: statistics.geometric_mean(entry.tokens_per_second.values())
        for entry in entries
        if entry.system == system and entry.error is None
    }
    return max(rates, key=rates.__getitem__, default=None)


class Calibration:
    """Tries the variants that the journal does not have yet."""

    def __init__(
        self,
        setup: Setup,
        vocabulary: range,
        work: Path,
        journal: Journal,
        seed: int,
        *,
        sizes: Sizes = STANDARD,
        variants: Collection[str] = (),
    ) -> None:
        """variants: names of the only ones to try; none: all of them."""
        self._sizes = sizes
        self._variants = variants
        self._setup = setup
        self._vocabulary = vocabulary
        self._work = work
        self._journal = journal
        self._seed = seed

    def untried(self, system: System) -> Mapping[str, System]:
        """Return the variants to try: those without figures, where there is a choice."""
        wanted = {
            name: each
            for name, each in system.variants.items()
            if not self._variants or name in self._variants
        }
        if len(system.variants) == 1 or (len(wanted) == 1 and self._variants):
            return {}
        known = {
            entry.variant
            for entry in self._journal.of(Calibrated)
            if entry.system == system.name and entry.error is None
        }
        return {name: each for name, each in wanted.items() if name not in known}

    def best(self, system: System) -> System:
        """Return the fastest variant; the first one where none has been measured."""
        variants = system.variants
        name = best_variant(self._journal.of(Calibrated), system.name)
        if name is None:
            name = next((each for each in variants if each in self._variants), None)
        return variants.get(name or "", next(iter(variants.values())))

    async def try_out(self, name: str, variant: System, seconds: float) -> None:
        """Measure a variant; a failure is its result, and so is a longer time than `seconds`."""
        entry = Calibrated(system=variant.name, variant=name)
        fleet = Fleet(STAGE.name, self._setup, self._work, self._journal)
        try:
            running = await fleet.start(variant)
            async with asyncio.timeout(seconds):
                rates = await self._measure(running)
            entry = msgspec.structs.replace(entry, tokens_per_second=rates)
        except Exception as error:  # a peer's: the other variants are tried, whatever it is
            reason = error.message if isinstance(error, LoraplexError) else repr(error)
            entry = msgspec.structs.replace(entry, error=reason)
        finally:
            await fleet.stop_others(None)
        self._journal.add(entry)

    async def _measure(self, running: Running) -> dict[str, float]:
        rates: dict[str, list[float]] = {case: [] for case in _NUM_STREAMS}
        await self._run(running, "W2-8", 0)
        start = time.monotonic()
        for repeat in range(1, self._sizes.num_trials + 1):
            for case, values in rates.items():
                values.append(await self._run(running, case, repeat))
            if time.monotonic() - start > _SECONDS:
                break
        return {case: statistics.median(values) for case, values in rates.items()}

    async def _run(self, running: Running, case: str, repeat: int) -> float:
        """Return output tokens per second. Raises RuntimeError if a request fails."""
        prompt, output = (Lengths(length, length) for length in self._sizes.trial)
        load = Workload(
            num_requests=_NUM_STREAMS[case],
            prompt_tokens=prompt,
            output_tokens=output,
            popularity=BaseOnly(),
            num_adapters=1,
            arrivals=Burst(),
            seed=self._seed,
        )
        requests = generate(load, repeat, self._vocabulary)
        figures = await run_load(running, requests, load.concurrency)
        if figures.num_failed:
            raise RuntimeError(f"{case}: {figures.errors[0]}")
        return figures.output_tokens_per_second
