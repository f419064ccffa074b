"""The running systems: started at their first use, stopped when they fail or at the end."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from comparison.journal import Journal, Started, StartKind
from comparison.page_cache import drop_from_page_cache, wait_for_files
from comparison.processes import cpu_seconds, resident_bytes, variables_of_children
from comparison.systems import Running, Setup, System
from loraplex.core.errors import ConfigError

_MAX_FAILURES = 2
_IDLE_SECONDS = 1.0
_SETTLE_SECONDS = 0.2
_MAX_SETTLE_PAUSES = 25
_BUSY_CORES = 0.25
"""A system that takes as much is not idle yet; one that always does is waited for in vain."""


class Fleet:
    """Fleet of one stage."""

    def __init__(
        self,
        stage: str,
        setup: Setup,
        work: Path,
        journal: Journal,
        *,
        measures_starts: bool = False,
    ) -> None:
        """measures_starts: the first start of a system in the journal is three, one after another:
        one that makes what is missing, a cold one and a warm one. No other system may be up.
        """
        self._measures_starts = measures_starts
        self._stage = stage
        self._setup = setup
        self._work = work
        self._journal = journal
        self._running: dict[str, Running] = {}
        self._folders: dict[str, Path] = {}
        self._prepared: set[str] = set()
        self._num_failures: dict[str, int] = {}
        self._num_starts = 0

    def find(self, system: System) -> Running | None:
        """If it is up."""
        return self._running.get(system.name)

    def is_prepared(self, system: System) -> bool:
        """Whether it was prepared since it started."""
        return system.name in self._prepared

    def set_prepared(self, system: System) -> None:
        self._prepared.add(system.name)

    async def start(self, system: System) -> Running:
        """Raises ConfigError if it does not start, or has failed too often."""
        if self._num_failures.get(system.name, 0) >= _MAX_FAILURES:
            raise ConfigError(f"{system.name} failed {_MAX_FAILURES} times and is left alone")
        has_started = any(
            (entry.system, entry.stage, entry.kind) == (system.name, self._stage, "warm")
            for entry in self._journal.of(Started)
        )
        if not self._measures_starts or has_started:
            return await self._start(system, "")
        await self._start(system, "first")
        await wait_for_files(self._setup.cache)
        await self._stop(system.name)
        await asyncio.to_thread(drop_from_page_cache, self._setup.model.parent)
        await self._start(system, "cold")
        await self._stop(system.name)
        return await self._start(system, "warm")

    async def _start(self, system: System, kind: StartKind) -> Running:
        setup = self._setup_of(system)
        await system.prepare(setup)
        start = time.monotonic()
        running = await system.start(setup)
        seconds = time.monotonic() - start
        self._running[system.name] = running
        await self._report(system, kind, running, seconds)
        return running

    async def settle(self) -> None:
        """Wait until no system computes: threads of llama.cpp poll for up to 0.35 s after a run."""
        roots = [pid for running in self._running.values() for pid in running.process_ids]
        for _ in range(_MAX_SETTLE_PAUSES):
            if await _busy_cores(roots, _SETTLE_SECONDS) < _BUSY_CORES:
                return

    async def stop_failed(self, system: System) -> None:
        """Stop it if it is up; after some failures it is not started again."""
        self._num_failures[system.name] = self._num_failures.get(system.name, 0) + 1
        await self._stop(system.name)

    async def stop_others(self, system: System | None) -> None:
        """All but this one."""
        names = [name for name in self._running if system is None or name != system.name]
        await asyncio.gather(*(self._stop(name) for name in names))

    async def _stop(self, name: str) -> None:
        """Its folder goes, too; its log stays."""
        self._prepared.discard(name)
        running = self._running.pop(name, None)
        if running is not None:
            await running.stop()
        if (folder := self._folders.pop(name, None)) is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _setup_of(self, system: System) -> Setup:
        """Return the setup of a system, with folders of its own."""
        label = "".join(c if c.isalnum() else "-" for c in f"{self._stage} {system.name}")
        # A log of an earlier start would report that this one is ready, and where that one was.
        while (log := self._work / f"{label}-{self._num_starts}.log").exists():
            self._num_starts += 1
        work = log.with_suffix("")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self._folders[system.name] = work
        log.touch()
        return msgspec.structs.replace(self._setup, work=work, log=log)

    async def _report(
        self, system: System, kind: StartKind, running: Running, seconds: float
    ) -> None:
        idle_cores = await _busy_cores(running.process_ids, _IDLE_SECONDS)
        self._journal.add(
            Started(
                system=system.name,
                stage=self._stage,
                seconds=seconds,
                kind=kind,
                resident_bytes=resident_bytes(running.process_ids),
                idle_cores=idle_cores,
                launch=running.launch,
                children=variables_of_children(running.process_ids),
            )
        )


async def _busy_cores(roots: Sequence[int], seconds: float) -> float:
    """Return how many cores the process trees use, measured for so long."""
    before = cpu_seconds(roots)
    await asyncio.sleep(seconds)
    return (cpu_seconds(roots) - before) / seconds
