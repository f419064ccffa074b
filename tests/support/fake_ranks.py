"""Ranks on fake runners: in threads of the test's process, or as processes of their own.

`python -m support.fake_ranks RANK` is the process of a rank.
"""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import ConfigError
from loraplex.core.plan import Capacity, StepPlan
from loraplex.engine.runner import AdapterLoader, Runner
from loraplex.parallel.executors import RankEnd
from loraplex.parallel.messages import RankStart
from loraplex.parallel.rank_process import be_rank_process, run_rank
from support.delayed_runner import DelayedRunner
from support.fake_loader import FakeLoader
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY, FakeRunner, FakeStep


class FakeRankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks behave. `rank` is the one that faults are planted in."""

    rank: int = 1
    capacity: Capacity = FAKE_CAPACITY
    other_capacity: Capacity | None = None
    overlap: bool = False
    version: str = "1"
    other_version: str = ""
    start_error: str = ""
    dies_at_start: bool = False
    broken_digest: str = ""
    """Adapter that cannot be read on the rank."""
    bad_step: int = 0
    """Step in which `fault` happens on the rank."""
    fault: str = ""
    """kill, stop, raise, row, token or sleep."""
    once: str = ""
    """File that the fault makes, and without which it happens again."""
    step_seconds: float = 0.0


class FaultyRunner(FakeRunner):
    """A FakeRunner with a planted fault."""

    settings = FakeRankSettings()

    def launch(self, plan: StepPlan) -> FakeStep:
        settings = self.settings
        time.sleep(settings.step_seconds)
        if plan.step_id != settings.bad_step or (settings.once and Path(settings.once).exists()):
            return super().launch(plan)
        if settings.once:
            Path(settings.once).touch()
        match settings.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError("planted")
            case "row":
                self.fail_rows()
            case "sleep":
                time.sleep(0.2)
        return super().launch(plan)


class BrokenLoader(FakeLoader):
    """A FakeLoader that cannot read one adapter."""

    broken = ""

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        if source.digest == self.broken:
            self.fail(source.digest)
        super().start(handle, source)


class FakeRankProgram:
    """Implements RankProgram."""

    def __init__(self, start: RankStart) -> None:
        self.world = start.world
        self.settings = msgspec.msgpack.decode(start.settings, type=FakeRankSettings)
        self.is_faulty = self.world.rank == self.settings.rank
        self.addresses: Mapping[int, bytes] = {}
        self.aborted = threading.Event()
        self.runner = FaultyRunner()
        self.loader = BrokenLoader()

    def traits(self) -> Mapping[str, str]:
        version = self.settings.version
        return {"version": (self.is_faulty and self.settings.other_version) or version}

    def open(self) -> bytes:
        return f"rank {self.world.rank}".encode()

    def connect(self, addresses: Mapping[int, bytes]) -> None:
        self.addresses = addresses

    def load(self) -> tuple[Runner, AdapterLoader]:
        settings, capacity = self.settings, self.settings.capacity
        expected = {rank: f"rank {rank}".encode() for rank in range(self.world.size)}
        assert self.addresses == expected
        if self.is_faulty:
            if settings.start_error:
                raise ConfigError(settings.start_error)
            if settings.dies_at_start:
                os.kill(os.getpid(), signal.SIGKILL)
            capacity = settings.other_capacity or capacity
            self.loader.broken = settings.broken_digest
        vocab_size = capacity.vocab_size
        lies = self.is_faulty and settings.fault == "token"
        model = FakeModel(vocab_size=vocab_size - 1 if lies else vocab_size)
        self.runner = FaultyRunner(capacity, model, self.loader)
        if self.is_faulty:
            self.runner.settings = settings
        return DelayedRunner(self.runner) if settings.overlap else self.runner, self.loader

    def abort(self, reason: str) -> None:
        self.aborted.set()

    def wait_ns(self) -> int:
        return 1000 + self.world.rank


@dataclasses.dataclass
class ThreadExecutor:
    """Implements Executor with threads, whose programs a test can see."""

    host: str = ""
    programs: dict[int, FakeRankProgram] = dataclasses.field(default_factory=dict)
    threads: list[threading.Thread] = dataclasses.field(default_factory=list)
    ended: Callable[[RankEnd], None] = lambda end: None

    def start(self, starts: Sequence[RankStart], ended: Callable[[RankEnd], None]) -> None:
        self.ended = ended
        for start in starts:
            thread = threading.Thread(target=self._run, args=(start, ended), daemon=True)
            self.threads.append(thread)
            thread.start()

    def stop(self, seconds: float) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, start: RankStart, ended: Callable[[RankEnd], None]) -> None:
        program = self.programs[start.world.rank] = FakeRankProgram(start)
        was_stopped = run_rank(start, lambda _: program)
        ended(RankEnd(start.world.rank, f"ended with status {int(not was_stopped)}"))


def process_command(rank: int) -> Sequence[str]:
    return (sys.executable, "-m", "support.fake_ranks", str(rank))


if __name__ == "__main__":
    be_rank_process(FakeRankProgram)
