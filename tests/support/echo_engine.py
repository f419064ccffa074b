"""The product's AsyncEngine on fake parts, whose engine takes a step when a reader awaits one."""

import asyncio
import collections
import weakref
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol, cast

import msgspec

from loraplex.core.adapter import AdapterSource
from loraplex.core.clock import Clock
from loraplex.core.errors import LoraplexError
from loraplex.core.output import EngineOutput
from loraplex.core.request import EngineRequest, RequestBatch, RequestId
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.stats import AdapterActivity, EngineStats
from loraplex.core.task import Generate
from loraplex.engine.channel import ThreadChannel
from loraplex.engine.engine import build_engine
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import (
    AbortRequest,
    AdaptersReport,
    EngineCommand,
    EngineEvent,
    EngineReady,
    PreloadAdapter,
    StepDone,
)
from loraplex.engine.step_marker import Progress
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.in_flight_request import OutputStream
from loraplex.serving.engines.link import EngineLink
from support.echo_runner import EchoOutput, EchoRunner, echo_capacity
from support.fake_loader import FakeLoader

_PAUSE_SECONDS = 0.001
"""Pause after a step without an output for the reader that awaits one."""


class EchoRecord(Protocol):
    """What a test sets, and what it reads."""

    delay_seconds: float
    num_cached_tokens: int
    fixed_stats: EngineStats | None
    activity: AdapterActivity | None
    finished: list[RequestId]
    aborted: list[RequestId]


class EchoEngine(AsyncEngine):
    """It is ready from the beginning, on whatever event loop calls it, and has no thread or task.

    The only reader gets the outputs one by one, however slow it is. With several, the fastest lets
    the engine step, and slower ones find their outputs merged.
    """

    def __init__(self, model: str, max_model_len: int, clock: Clock, record: EchoRecord) -> None:
        super().__init__(model, _no_other_engine, clock)
        self._record = record
        self._runner = EchoRunner(echo_capacity(max_model_len), loader := FakeLoader())
        self._engine = build_engine(
            self._runner,
            loader,
            clock,
            SchedulerSettings(enable_prefix_cache=False),
            adapter_host_bytes=1_000_000,
        )
        self._events: collections.deque[EngineEvent] = collections.deque()
        channel = ThreadChannel(self._events.append)
        self._loop = EngineLoop(self._engine, channel, clock)
        self._own_link = EchoLink(self)
        self._handle(EngineReady(self._engine.capacity), self._own_link)
        weakref.finalize(self, self.requests.close)

    def submit(
        self,
        request: EngineRequest,
        adapters: Sequence[AdapterSource],
        labels: Collection[Hashable] = (),
        batch: RequestBatch | None = None,
    ) -> OutputStream:
        if isinstance(request.task, Generate):  # the runner knows it by its seed
            sampling = msgspec.structs.replace(request.sampling, seed=request.request_id)
            request = request.with_sampling(sampling)
        stream = super().submit(request, adapters, labels, batch)
        return cast("OutputStream", EchoOutputs(self, request.request_id, stream))

    def output_of(self, request_id: RequestId) -> EchoOutput:
        return self._runner.output_of(request_id)

    def let_generate(self, request_id: RequestId, output: EchoOutput) -> None:
        """Set what a request that was submitted generates."""
        self._runner.outputs[request_id] = output

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        if sequence_index is None and request_id not in self._record.finished:
            self._record.aborted.append(request_id)
        super().abort(request_id, sequence_index)

    async def activity(self) -> AdapterActivity:
        return self._record.activity or await super().activity()

    async def recent_activity(self) -> AdapterActivity:
        return self._record.activity or await super().recent_activity()

    def apply(self, command: EngineCommand) -> None:
        """Let the engine apply a command, as between two steps."""
        self._loop._apply(command)
        self._loop._beat()
        self._deliver()
        if isinstance(command, AbortRequest | PreloadAdapter):  # no reader awaits what follows
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Do what no reader awaits: the end of aborted requests, loads of adapters."""
        self.step()
        while not self.num_requests and not self._engine.is_idle:
            self.step()

    def step(self) -> None:
        turn = self._engine.step()
        if turn.outputs or turn.record is not None:
            self._events.append(StepDone(turn.outputs, self._engine.stats(), turn.record))
        if self._engine.is_idle:
            self._engine.check()
        self._deliver()

    async def pause(self) -> None:
        """Wait as long as an output takes."""
        await asyncio.sleep(self._record.delay_seconds)

    def _deliver(self) -> None:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, StepDone):
                event = msgspec.structs.replace(
                    event, outputs=tuple(map(self._noted, event.outputs))
                )
            stats = self._record.fixed_stats
            if stats is not None and isinstance(event, StepDone | AdaptersReport):
                event = msgspec.structs.replace(event, stats=stats)
            self._handle(event, self._own_link)

    def _noted(self, output: EngineOutput) -> EngineOutput:
        request_id, record = output.request_id, self._record
        if output.finished:
            self._runner.outputs.pop(request_id, None)
            if request_id not in record.aborted:
                record.finished.append(request_id)
        if output.timing is None:
            return output
        timing = msgspec.structs.replace(output.timing, num_cached_tokens=record.num_cached_tokens)
        return msgspec.structs.replace(output, timing=timing)


class EchoLink:
    """Implements serving.engines.link.EngineLink: commands are applied at once."""

    def __init__(self, engine: EchoEngine) -> None:
        self._engine = weakref.proxy(engine)

    def send(self, command: EngineCommand) -> None:
        self._engine.apply(command)

    async def receive(self) -> EngineEvent:
        raise AssertionError("events are delivered as they come")

    def progress(self) -> Progress | None:
        return None

    def kill(self, problem: str) -> None:
        raise AssertionError(f"nothing watches it: {problem}")

    async def close(self) -> None:
        """It has nothing to close."""


class EchoOutputs:
    """Implements serving.engines.in_flight_request.EngineOutputs: its reader drives the engine."""

    def __init__(self, engine: EchoEngine, request_id: RequestId, stream: OutputStream) -> None:
        self._engine = engine
        self._request_id = request_id
        self._stream = stream
        self._num_taken = 0

    async def take(self) -> list[EngineOutput]:
        if not self._stream.pending:
            self._raise_defect()
            await self._engine.pause()
        while not self._stream.pending:
            self._engine.step()
            if not self._stream.pending:
                await asyncio.sleep(_PAUSE_SECONDS)
        outputs = await self._stream.take()
        self._num_taken += len(outputs)
        return outputs

    def _raise_defect(self) -> None:
        """Raise the error that no engine has."""
        output = self._engine.output_of(self._request_id)
        error = output.error
        if error is None or isinstance(error, LoraplexError):
            return
        if self._num_taken >= output.after_outputs:
            raise error

    def leave(self) -> None:
        self._stream.leave()


async def _no_other_engine(epoch: int) -> EngineLink:
    raise AssertionError(f"engine {epoch} is not started: the first one is there and lives")
