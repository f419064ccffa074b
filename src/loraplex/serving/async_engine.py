"""Requests to one engine, as async iterators, across the engine's deaths.

Owns the streams of the requests in work and starts the engine again when it dies. It knows tokens
only; text, names and tenants are the service's.
"""

import asyncio
import collections
import enum
import itertools
import logging
from collections.abc import Collection, Hashable, Mapping, Sequence

from loraplex.core.adapter import AdapterSource, Residency
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
    AskResidency,
    EngineEvent,
    EngineFailed,
    EngineReady,
    PreloadAdapter,
    RegisterAdapter,
    ResidencyTold,
    StepDone,
    UnregisterAdapter,
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

    def __init__(self, labels: Collection[Hashable] = ()) -> None:
        self.labels = labels
        self._pending: list[EngineOutput] = []
        self._filled = asyncio.Event()

    def put(self, output: EngineOutput) -> None:
        self._pending.append(output)
        self._filled.set()

    async def take(self) -> list[EngineOutput]:
        """All outputs since the last call; waits for at least one. None follow a finished one."""
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
        self._rejected: dict[str, ErrorInfo] = {}
        """Digests that the running engine knows, and those that it can never serve."""
        self._residency_queries: dict[int, asyncio.Future[Mapping[str, Residency]]] = {}
        self._query_ids = itertools.count(1)
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Capacity:
        """Start the engine and wait until it is ready. Raises what keeps it from starting."""
        if self.state is EngineState.STARTING:
            self._task = asyncio.create_task(self._run(), name=f"engine-{self.model}")
            await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        if self._capacity is None:
            raise NotReadyError(f"the engine of model {self.model!r} was stopped as it started")
        return self._capacity

    async def close(self) -> None:
        """Stop the engine. Requests in work end with an error, and so does a start in work."""
        self.state = EngineState.CLOSED
        self._fail_all(NotReadyError("the server is stopping").to_info())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._settled.set()

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

    @property
    def registered(self) -> Collection[str]:
        """The digests that the running engine was told of and has not been told to forget."""
        return frozenset(self._registered)

    def submit(
        self,
        request: EngineRequest,
        adapters: Sequence[AdapterSource],
        labels: Collection[Hashable] = (),
    ) -> OutputStream:
        """Give a request to the engine. By one of its labels, fail_labelled can end it.

        Raises NotReadyError while there is none, and what it said of an adapter that it rejected.
        """
        link = self._require_link()
        for source in adapters:
            self._register(link, source)
        link.send(AddRequest(request))
        stream = self._streams[request.request_id] = OutputStream(labels)
        return stream

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End a request, or one sequence of it; its stream then gets its last output."""
        if request_id in self._streams and self._link is not None:
            self._link.send(AbortRequest(request_id, sequence_index))

    def num_labelled(self, label: Hashable) -> int:
        """Requests in work that carry a label."""
        return sum(label in stream.labels for stream in self._streams.values())

    def fail_labelled(self, label: Hashable, error: LoraplexError) -> int:
        """End the requests that carry a label, with an error; how many those were."""
        found = [(id_, stream) for id_, stream in self._streams.items() if label in stream.labels]
        for request_id, stream in found:
            self.abort(request_id)
            del self._streams[request_id]
            stream.put(EngineOutput(request_id, finished=True, error=error.to_info()))
        return len(found)

    def forget_adapter(self, digest: str) -> None:
        """Let the engine forget an adapter once no request needs it. It may be named again."""
        self._rejected.pop(digest, None)
        if digest in self._registered:
            self._registered.remove(digest)
            if self._link is not None:
                self._link.send(UnregisterAdapter(digest))

    async def residency(self) -> Mapping[str, Residency]:
        """Where the adapters are, by digest; what is absent is left out.

        Answered between two steps; empty while there is no engine.
        """
        if self._link is None or not self.is_ready:
            return {}
        query_id = next(self._query_ids)
        told = self._residency_queries[query_id] = asyncio.get_running_loop().create_future()
        self._link.send(AskResidency(query_id))
        try:
            residency: Mapping[str, Residency] = await told
            return residency
        finally:
            del self._residency_queries[query_id]

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
        rejection = self._rejected.get(source.digest)
        if rejection is not None:
            raise error_from_info(rejection)
        if source.digest not in self._registered:
            self._registered.add(source.digest)
            link.send(RegisterAdapter(source))

    async def _run(self) -> None:
        """Serve one engine after the other until closed, or until one cannot start."""
        try:
            await self._run_epochs()
        except Exception:
            logger.exception("model %s: its engine is given up", self.model)
            self.failure = InternalError(f"the engine of model {self.model!r} was given up")
        self.state = EngineState.FAILED
        self._settled.set()

    async def _run_epochs(self) -> None:
        """Returns when the first engine could not start; `failure` then says why."""
        pause = _FIRST_PAUSE_SECONDS
        for epoch in itertools.count(1):
            started_ns = self._clock.now_ns()
            await self._run_epoch(epoch)
            if self._capacity is None:
                self.failure = self.failure or InternalError(
                    f"the engine of model {self.model!r} ended while it started; its log says why"
                )
                return
            self.num_restarts += 1
            if self._clock.now_ns() - started_ns > _STABLE_SECONDS * 1e9:
                pause = _FIRST_PAUSE_SECONDS
            logger.info("model %s: its engine is started again in %g s", self.model, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _run_epoch(self, epoch: int) -> None:
        """One engine's life. Returns when it is gone; then its requests have been told."""
        try:
            link = await self._start_link(epoch)
        except LoraplexError as error:
            self._cannot_start(error)
            return
        except OSError as error:
            self._cannot_start(InternalError(f"the engine cannot be started: {error}"))
            return
        try:
            while self.failure is None:
                self._handle(await link.receive(), link)
        except EngineDied as death:
            logger.error("model %s: %s", self.model, death)
        finally:
            self._lose_engine()
            await link.close()

    def _lose_engine(self) -> None:
        self._link = None
        self._registered.clear()
        self._rejected.clear()
        for query in self._residency_queries.values():
            if not query.done():
                query.set_result({})
        self.stats = EngineStats()
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
        self._fail_all(
            EngineRestartedError(
                "the engine stopped while it worked on this request; it is being started "
                "again: please send the request once more",
                retry_after_seconds=5,
            ).to_info()
        )

    def _handle(self, event: EngineEvent, link: EngineLink) -> None:
        match event:
            case EngineReady(capacity):
                if self.num_restarts:
                    logger.warning("model %s: its engine is back", self.model)
                self._capacity = capacity
                self._link = link
                self.state = EngineState.READY
                self._settled.set()
            case EngineFailed(error):
                self._cannot_start(error_from_info(error))
            case StepDone(outputs, stats, record):
                self.stats = stats
                if record is not None:
                    self.steps.append(record)
                for output in outputs:
                    self._deliver(output)
            case ResidencyTold(query_id, residency):
                query = self._residency_queries.get(query_id)
                if query is not None and not query.done():
                    query.set_result(residency)
            case AdapterRejected(digest, error):
                logger.warning("model %s refused adapter %s: %s", self.model, digest, error.message)
                self._rejected[digest] = error

    def _cannot_start(self, error: LoraplexError) -> None:
        """An engine that has run before is tried again; one that never has is not."""
        if self._capacity is None:
            self.failure = error
        else:
            logger.error("model %s: the engine failed: %s", self.model, error.message)

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
