"""Requests to one engine, as async iterators, across the engine's deaths.

Owns the streams of the requests in work and starts the engine again when it dies. It knows tokens
only; text, names and tenants are the service's.
"""

import asyncio
import collections
import enum
import logging
from collections.abc import Sequence

from loraplex.core.adapter import AdapterSource
from loraplex.core.clock import Clock
from loraplex.core.errors import (
    EngineRestartedError,
    ErrorInfo,
    InternalError,
    LoraplexError,
    NotReadyError,
    error_from_info,
)
from loraplex.core.output import EngineOutput
from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.engine.messages import (
    AbortRequest,
    AdapterRejected,
    AddRequest,
    EngineEvent,
    EngineFailed,
    EngineReady,
    PreloadAdapter,
    RegisterAdapter,
    StepDone,
)
from loraplex.serving.engine_link import EngineDied, EngineLink, LinkFactory

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 30.0
_STABLE_SECONDS = 60.0
_STEP_LOG_LENGTH = 1000


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    """It cannot start: the reason is in `failure`."""
    CLOSED = "closed"


class OutputStream:
    """The outputs of one request. A slow reader finds them merged; it never holds a step back."""

    def __init__(self) -> None:
        self._pending: list[EngineOutput] = []
        self._filled = asyncio.Event()
        self.finished = False
        """The last output was put; it may not have been read yet."""

    def put(self, output: EngineOutput) -> None:
        self._pending.append(output)
        self.finished = self.finished or output.finished
        self._filled.set()

    async def take(self) -> list[EngineOutput]:
        """All outputs since the last call; waits for at least one."""
        await self._filled.wait()
        self._filled.clear()
        outputs, self._pending = self._pending, []
        return outputs


class AsyncEngine:
    """One served model's engine. All methods run on serving's event loop."""

    def __init__(self, model: str, start_link: LinkFactory, clock: Clock) -> None:
        self.model = model
        self.state = EngineState.STARTING
        self.failure: LoraplexError | None = None
        self.num_restarts = 0
        self.stats = EngineStats()
        self.steps: collections.deque[StepRecord] = collections.deque(maxlen=_STEP_LOG_LENGTH)
        self._start_link = start_link
        self._clock = clock
        self._link: EngineLink | None = None
        self._capacity: Capacity | None = None
        self._streams: dict[RequestId, OutputStream] = {}
        self._registered: set[str] = set()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Capacity:
        """Start the engine and wait until it is ready. Raises what keeps it from starting."""
        self._task = asyncio.create_task(self._run(), name=f"engine-{self.model}")
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        return self.capacity

    async def close(self) -> None:
        """Stop the engine. Requests in work end with an error."""
        self.state = EngineState.CLOSED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(NotReadyError("the server is stopping").to_info())

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def capacity(self) -> Capacity:
        assert self._capacity is not None, "known once the engine has started"
        return self._capacity

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def submit(self, request: EngineRequest, adapters: Sequence[AdapterSource]) -> OutputStream:
        """Give a request to the engine. Raises NotReadyError while there is none."""
        link = self._require_link()
        for source in adapters:
            self._register(link, source)
        stream = OutputStream()
        self._streams[request.request_id] = stream
        link.send(AddRequest(request))
        return stream

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End a request, or one sequence of it; its stream then gets its last output."""
        if request_id in self._streams and self._link is not None and self.is_ready:
            self._link.send(AbortRequest(request_id, sequence_index))

    def preload(self, source: AdapterSource) -> None:
        """Ask for an adapter ahead of its first request."""
        link = self._require_link()
        self._register(link, source)
        link.send(PreloadAdapter(source.digest))

    def _require_link(self) -> EngineLink:
        if self._link is None or not self.is_ready:
            raise NotReadyError(
                f"the engine of model {self.model!r} is {self.state}", retry_after_seconds=2
            )
        return self._link

    def _register(self, link: EngineLink, source: AdapterSource) -> None:
        if source.digest not in self._registered:
            self._registered.add(source.digest)
            link.send(RegisterAdapter(source))

    async def _run(self) -> None:
        """Serve one engine after the other until closed, or until one cannot start."""
        pause = _FIRST_PAUSE_SECONDS
        epoch = 0
        while True:
            epoch += 1
            started_ns = self._clock.now_ns()
            await self._run_epoch(epoch)
            if self._capacity is None and self.failure is None:
                self.failure = InternalError(
                    f"the engine of model {self.model!r} ended while it started; its log says why"
                )
            if self.failure is not None:
                self.state = EngineState.FAILED
                self._settled.set()
                return
            self.num_restarts += 1
            if self._clock.now_ns() - started_ns > _STABLE_SECONDS * 1e9:
                pause = _FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _run_epoch(self, epoch: int) -> None:
        """One engine's life. Returns when it died; then its requests have been told."""
        link = await self._start_link(epoch)
        try:
            while True:
                self._handle(await link.receive(), link)
                if self.failure is not None:
                    return
        except EngineDied as death:
            logger.error("model %s: %s; starting it again", self.model, death)
        finally:
            if self.state is not EngineState.CLOSED:
                self.state = EngineState.RESTARTING
            self._link = None
            self._registered.clear()
            self._fail_all(
                EngineRestartedError(
                    "the engine stopped while it worked on this request; it is being started "
                    "again: please send the request once more",
                    retry_after_seconds=5,
                ).to_info()
            )
            await link.close()

    def _handle(self, event: EngineEvent, link: EngineLink) -> None:
        match event:
            case EngineReady(capacity):
                self._capacity = capacity
                self._link = link
                self.state = EngineState.READY
                self._settled.set()
            case EngineFailed(error):
                # An engine that has run before may start again; one that never has cannot.
                if self._capacity is None:
                    self.failure = error_from_info(error)
                else:
                    logger.error("model %s: the engine failed: %s", self.model, error.message)
            case StepDone(outputs, stats, record):
                self.stats = stats
                if record is not None:
                    self.steps.append(record)
                for output in outputs:
                    self._deliver(output)
            case AdapterRejected(digest, error):
                logger.warning("model %s refused adapter %s: %s", self.model, digest, error.message)

    def _deliver(self, output: EngineOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finished:
            del self._streams[output.request_id]
        stream.put(output)

    def _fail_all(self, error: ErrorInfo) -> None:
        for request_id, stream in self._streams.items():
            stream.put(EngineOutput(request_id, finished=True, error=error))
        self._streams.clear()
