"""Engine that reports scripted events, and functions that build them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from loraplex.core.errors import ErrorInfo
from loraplex.core.output import EngineOutput, FinishReason, SequenceDelta
from loraplex.core.request import RequestId
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.engine.messages import EngineCommand, EngineEvent, EngineReady, StepDone
from loraplex.engine.step_marker import Progress
from loraplex.serving.engines.engine_state import EngineEnd
from loraplex.serving.engines.in_flight_request import OutputStream
from loraplex.serving.engines.link import EngineDied
from support.fake_runner import FAKE_CAPACITY

READY = EngineReady(FAKE_CAPACITY)


class ScriptedLink:
    """Implements EngineLink. It reports what is put into `events`; None is its death."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.events: asyncio.Queue[EngineEvent | Exception | None] = asyncio.Queue()
        self.commands: list[EngineCommand] = []
        self.is_closed = False
        self.reading = Progress(1)
        """What progress() returns."""
        self.problem = ""
        """Why it was killed."""
        self.in_flight: tuple[RequestId, ...] = ()
        """Requests of its steps, when it was killed."""

    def send(self, command: EngineCommand) -> None:
        self.commands.append(command)

    async def receive(self) -> EngineEvent:
        event = await self.events.get()
        if event is None:
            raise EngineDied("by script")
        if isinstance(event, Exception):
            raise event
        return event

    def progress(self) -> Progress:
        return self.reading

    def kill(self, problem: str) -> None:
        self.problem = problem
        self.say(EngineDied(problem, self.in_flight, EngineEnd.HANG))

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True

    def say(self, *events: EngineEvent | Exception | None) -> None:
        for event in events:
            self.events.put_nowait(event)


class Script:
    """Starts ScriptedLinks, or raises `errors` first, one for each start."""

    def __init__(self) -> None:
        self.links: list[ScriptedLink] = []
        self.errors: list[Exception] = []
        self.first_events: list[EngineEvent | Exception | None] = [READY]
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, epoch: int) -> ScriptedLink:
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.links.append(ScriptedLink(epoch))
        self.links[-1].say(*self.first_events)
        return self.links[-1]

    @property
    def link(self) -> ScriptedLink:
        return self.links[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; for ten seconds at most."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def ended(stream: OutputStream) -> list[EngineOutput]:
    """All outputs up to the last."""
    outputs: list[EngineOutput] = []
    while not (outputs and outputs[-1].finished):
        outputs += await stream.take()
    return outputs


async def tokens_of(
    stream: OutputStream, outputs: Sequence[EngineOutput] = ()
) -> dict[int, list[int]]:
    """Return a successful request's tokens by sequence. outputs: those already received."""
    outputs = [*outputs]
    outputs += [] if outputs and outputs[-1].finished else await ended(stream)
    assert outputs[-1].error is None
    tokens: dict[int, list[int]] = {}
    for delta in (delta for output in outputs for delta in output.deltas):
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


async def error_of(stream: OutputStream) -> ErrorInfo | None:
    outputs = await stream.take()
    assert outputs[-1].finished
    return outputs[-1].error


def says(
    request_id: RequestId, *deltas: tuple[Any, ...], finished: bool = False, **fields: Any
) -> StepDone:
    """deltas: (index, token ids ..., perhaps a finish reason)."""
    made = []
    for index, *rest in deltas:
        reason = rest.pop() if isinstance(rest[-1], FinishReason) else None
        made.append(SequenceDelta(index, tuple(rest), finish_reason=reason))
    output = EngineOutput(request_id, tuple(made), finished=finished, **fields)
    return StepDone((output,), EngineStats(steps=1))


def done(request_id: RequestId, *token_ids: int, finished: bool = True, **fields: Any) -> StepDone:
    """Its only output; with `finished`, its last."""
    output = EngineOutput(
        request_id, (SequenceDelta(0, token_ids),) if token_ids else (), finished=finished, **fields
    )
    return StepDone((output,), EngineStats(steps=1))


def step_of(*request_ids: RequestId, **fields: int) -> StepDone:
    """Return a step that had rows of these requests and no outputs."""
    return StepDone((), EngineStats(), record_of(request_ids=request_ids, **fields))


def record_of(**fields: Any) -> StepRecord:
    """Return the record of a step; fields that are not given are 0."""
    numbers: dict[str, Any] = dict.fromkeys(StepRecord.__struct_fields__[:16], 0)
    return StepRecord(**(numbers | fields))


def died(*request_ids: RequestId, was_killed: bool = False) -> EngineDied:
    end = EngineEnd.KILL if was_killed else EngineEnd.CRASH
    return EngineDied("by script", request_ids, end)
