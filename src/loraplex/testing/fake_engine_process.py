"""An engine on fake parts, in a thread or in its own process: serving's tests need no model.

`python -m loraplex.testing.fake_engine_process` stands in for `loraplex.app.engine`.
"""

import sys
import time
from collections.abc import Awaitable

import msgspec

from loraplex.core.clock import SystemClock
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import Capacity, StepPlan
from loraplex.engine.channel import EngineChannel
from loraplex.engine.engine import build_engine
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import EngineFailed
from loraplex.engine.process import be_engine_process
from loraplex.scheduling.settings import SchedulerSettings
from loraplex.serving.engine_link import EngineLink, LinkFactory, ProcessLink, ThreadLink
from loraplex.testing.fake_loader import FakeLoader
from loraplex.testing.fake_model import FakeModel
from loraplex.testing.fake_runner import FAKE_CAPACITY, FakeRunner, FakeStep

_COMMAND = (sys.executable, "-m", "loraplex.testing.fake_engine_process")


class FakeEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine behaves."""

    capacity: Capacity = FAKE_CAPACITY
    step_seconds: float = 0.0
    """How long each step takes, so that a test can act meanwhile."""
    start_seconds: float = 0.0
    max_queue_size: int = 0
    failure: ErrorInfo | None = None
    """It cannot start, and says why."""
    crash: bool = False
    """It ends before it is ready, and says nothing."""


class SlowRunner(FakeRunner):
    """A FakeRunner whose steps take time."""

    step_seconds = 0.0

    def launch(self, plan: StepPlan) -> FakeStep:
        time.sleep(self.step_seconds)
        return super().launch(plan)


def run_fake_engine(settings: FakeEngineSettings, channel: EngineChannel) -> None:
    """Serve the channel until Shutdown."""
    time.sleep(settings.start_seconds)
    if settings.crash:
        return
    if settings.failure is not None:
        channel.send(EngineFailed(settings.failure))
        return
    capacity, loader, clock = settings.capacity, FakeLoader(), SystemClock()
    runner = SlowRunner(capacity, FakeModel(capacity.vocab_size), loader)
    runner.step_seconds = settings.step_seconds
    engine = build_engine(
        runner,
        loader,
        clock,
        SchedulerSettings(max_queue_size=settings.max_queue_size),
        adapter_host_bytes=1_000_000,
    )
    EngineLoop(engine, channel, clock, check_when_idle=True).run()
    engine.close()


def fake_engine_thread(settings: FakeEngineSettings | None = None) -> LinkFactory:
    """As app.engine.engine_thread."""

    async def start(_epoch: int) -> EngineLink:
        return ThreadLink(
            lambda channel: run_fake_engine(settings or FakeEngineSettings(), channel)
        )

    return start


def fake_engine_process(settings: FakeEngineSettings | None = None) -> LinkFactory:
    """As app.builder.engine_process."""
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
