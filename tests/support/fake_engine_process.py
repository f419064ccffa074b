"""An engine on fake parts, in a thread or in its own process: serving's tests need no model.

`python -m support.fake_engine_process` stands in for `loraplex.app.engine_process`.
"""

import os
import sys
import time
from collections.abc import Awaitable

import msgspec

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.clock import SystemClock
from loraplex.core.errors import ConfigError, ErrorInfo
from loraplex.core.plan import Capacity, StepPlan
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.channel import EngineChannel
from loraplex.engine.engine import build_engine
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import EngineFailed
from loraplex.engine.process import be_engine_process
from loraplex.engine.runner import AdapterLoader, RankProbes, Runner
from loraplex.parallel.multiprocess import MultiprocessExecutor
from loraplex.parallel.start import end_of_process, start_sharded
from loraplex.parallel.world import World
from loraplex.serving.engines.link import EngineLink, LinkFactory, ProcessLink, ThreadLink
from support.fake_loader import FakeLoader
from support.fake_model import FakeModel
from support.fake_ranks import FakeRankProgram, FakeRankSettings, process_command
from support.fake_runner import FAKE_CAPACITY, FakeRunner, FakeStep

_COMMAND = (sys.executable, "-m", "support.fake_engine_process")


class FakeEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine behaves."""

    capacity: Capacity = FAKE_CAPACITY
    step_seconds: float = 0.0
    """How long each step takes, so that a test can act meanwhile."""
    start_seconds: float = 0.0
    max_queue_size: int = 0
    failure: ErrorInfo | None = None
    """It cannot start, and reports why."""
    crash: bool = False
    """It ends before it is ready, and reports nothing."""
    poison_prompt: tuple[int, ...] = ()
    """The step that computes output token number `poison_output` after this prompt aborts."""
    poison_output: int = 0
    poison_adapter: str = ""
    """The engine aborts when it starts to load the adapter of this digest."""
    ranks: FakeRankSettings | None = None
    """It has three ranks, which are processes and behave like this."""


class PoisonLoader(FakeLoader):
    """A FakeLoader that dies of one adapter."""

    poison = ""

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        if self.poison and source.digest == self.poison:
            os.abort()
        super().start(handle, source)


class SlowRunner(FakeRunner):
    """A FakeRunner whose steps take time, and one of whose prompts kills the process."""

    step_seconds = 0.0
    poison: tuple[int, ...] = ()
    poison_length = 0
    _poisoned_slots: frozenset[int] = frozenset()

    def launch(self, plan: StepPlan) -> FakeStep:
        time.sleep(self.step_seconds)
        self._poisoned_slots -= {*plan.removed}
        if self.poison:
            self._poisoned_slots |= {
                row.slot
                for row in plan.added
                if row.token_ids[: row.num_prompt_tokens] == self.poison
            }
        for step in plan.rows:
            is_there = step.start + step.num_tokens == self.poison_length
            if step.slot in self._poisoned_slots and is_there:
                os.abort()
        return super().launch(plan)


def run_fake_engine(settings: FakeEngineSettings, channel: EngineChannel) -> None:
    """Serve the channel until Shutdown."""
    time.sleep(settings.start_seconds)
    if settings.crash:
        return
    if settings.failure is not None:
        channel.send(EngineFailed(settings.failure))
        return
    try:
        runner, loader, ranks = _parts(settings, channel)
    except ConfigError as error:
        channel.send(EngineFailed(error.to_info()))
        return
    clock = SystemClock()
    engine = build_engine(
        runner,
        loader,
        clock,
        SchedulerSettings(max_queue_size=settings.max_queue_size),
        adapter_host_bytes=1_000_000,
        ranks=ranks,
    )
    EngineLoop(engine, channel, clock, check_when_idle=True).run()
    engine.close()


def _parts(
    settings: FakeEngineSettings, channel: EngineChannel
) -> tuple[Runner, AdapterLoader, RankProbes | None]:
    if settings.ranks is not None:
        body, world = msgspec.msgpack.encode(settings.ranks), World(0, 3, 1)
        executor = MultiprocessExecutor(process_command)
        return start_sharded(world, body, FakeRankProgram, executor, end_of_process(channel.marker))
    capacity, loader = settings.capacity, PoisonLoader()
    loader.poison = settings.poison_adapter
    runner = SlowRunner(capacity, FakeModel(capacity.vocab_size), loader)
    runner.step_seconds = settings.step_seconds
    runner.poison = settings.poison_prompt
    runner.poison_length = len(settings.poison_prompt) + settings.poison_output
    return runner, loader, None


def fake_engine_thread(settings: FakeEngineSettings | None = None) -> LinkFactory:
    """Replacement of app.engine.engine_thread."""

    async def start(_epoch: int) -> EngineLink:
        return ThreadLink(
            lambda channel: run_fake_engine(settings or FakeEngineSettings(), channel)
        )

    return start


def fake_engine_process(settings: FakeEngineSettings | None = None) -> LinkFactory:
    """Replacement of app.builder.engine_process."""
    body = msgspec.msgpack.encode(settings or FakeEngineSettings())

    def start(epoch: int) -> Awaitable[EngineLink]:
        return ProcessLink.start(_COMMAND, body, epoch)

    return start


def main() -> None:
    be_engine_process(
        lambda settings, channel: run_fake_engine(
            msgspec.msgpack.decode(settings, type=FakeEngineSettings), channel
        )
    )


if __name__ == "__main__":
    main()
