"""Requests to one engine, as async iterators, across the engine's deaths.

It starts the engine again when it dies, and gives the in-flight requests to the new one: their
streams go on. It knows tokens only; text, names and tenants are the service's.
"""

import asyncio
import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from loraplex.core.adapter import AdapterSource, Residency
from loraplex.core.clock import Clock
from loraplex.core.errors import (
    ErrorInfo,
    InternalError,
    LoraplexError,
    NotReadyError,
    error_from_info,
)
from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest, RequestBatch, RequestId
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord
from loraplex.engine.messages import (
    AdapterPinned,
    AdapterRejected,
    AdaptersReport,
    EngineEvent,
    EngineFailed,
    EngineReady,
    PinAdapter,
    PreloadAdapter,
    StepDone,
    UnpinAdapter,
)
from loraplex.serving.engines.engine_state import EngineEnd, EngineState
from loraplex.serving.engines.engine_watchdog import LOOK_SECONDS, EngineWatchdog
from loraplex.serving.engines.in_flight_request import InFlightRequest, OutputStream
from loraplex.serving.engines.link import EngineDied, EngineLink, LinkFactory
from loraplex.serving.engines.queries import ActivityQueries, EngineQueries
from loraplex.serving.engines.request_dispatch import EngineRegistrations, RequestDispatch
from loraplex.serving.engines.restart_limits import RestartLimits, engine_gone

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 30.0
_STABLE_SECONDS = 60.0
_UNASKED = 0
"""Number of a query whose reply no caller awaits."""


@dataclasses.dataclass(slots=True)
class _Pinning:
    """Pin that the engine has not confirmed. It ends when no caller awaits it any more."""

    task: asyncio.Task[None]
    num_callers: int = 0


class AsyncEngine:
    """One served model's engine. All methods run on serving's event loop."""

    def __init__(
        self,
        model: str,
        start_link: LinkFactory,
        clock: Clock,
        *,
        num_steps_kept: int = 1000,
        patience: RestartLimits = RestartLimits(),  # noqa: B008
        watchdog: EngineWatchdog | None = None,
    ) -> None:
        self.model = model
        self.state = EngineState.STARTING
        self.failure: LoraplexError | None = None
        self.problem = ""
        """Why the last engine ended, until the next one is ready."""
        self.restarts = collections.Counter[EngineEnd]()
        self.stats = EngineStats()
        self.on_capacity: Callable[[Capacity], None] = lambda _: None
        """Called with the capacity of each engine that is ready; a later one may have less."""
        self.steps: collections.deque[StepRecord] = collections.deque(maxlen=num_steps_kept)
        self._start_link = start_link
        self._clock = clock
        self._watchdog = watchdog or EngineWatchdog(clock)
        self._link: EngineLink | None = None
        self._capacity: Capacity | None = None
        self._adapters = EngineRegistrations()
        self.requests = RequestDispatch(model, self._adapters, clock, patience)
        self._has_worked = False
        """The engine of now, or the last one, did a step."""
        self._activity = ActivityQueries()
        self._pin_replies = EngineQueries[ErrorInfo | None]()
        self._pinning: dict[str, _Pinning] = {}
        """Pins by digest that the engine has not confirmed yet."""
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
        """Stop the engine. In-flight requests end with an error, and so does a running start."""
        self.state = EngineState.CLOSED
        try:
            self.requests.fail_all(NotReadyError("the server is stopping"))
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            self._settled.set()
            self.requests.close()

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def num_restarts(self) -> int:
        return self.restarts.total()

    @property
    def has_started(self) -> bool:
        """Whether there ever was an engine."""
        return self._capacity is not None

    @property
    def capacity(self) -> Capacity:
        """Capacity of the running engine, or of the last one."""
        assert self._capacity is not None, "known once the engine has started"
        return self._capacity

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def registered(self) -> Collection[str]:
        """Digests of the adapters that are registered with the running engine.

        And those that in-flight requests need: the next engine may have to register them.
        """
        return frozenset(self._adapters.registered.union(self.requests.needed_adapters()))

    def submit(
        self,
        request: EngineRequest,
        adapters: Sequence[AdapterSource],
        labels: Collection[Hashable] = (),
        batch: RequestBatch | None = None,
    ) -> OutputStream:
        """Give a request to the engine. By one of its labels, fail_labelled can end it.

        With a batch it waits until that is closed.

        While the engine is started again the request waits for it. Raises NotReadyError before the
        first start and after the end, and what the engine said of an adapter that it rejected.
        """
        if self.state not in (EngineState.READY, EngineState.RESTARTING):
            raise self._not_ready()
        for source in adapters:
            self._adapters.expect(source)
        now_ns = self._clock.now_ns()
        submitted = InFlightRequest(request, adapters, labels, submitted_ns=now_ns, batch=batch)
        self.requests.submit(submitted)
        return submitted.stream

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End a request, or one sequence of it; its stream then gets its last output."""
        self.requests.abort(request_id, sequence_index)

    def forget_adapter(self, digest: str) -> None:
        """Let the engine forget an adapter once no request needs it. It may be named again."""
        send = None if self._link is None else self._link.send
        self._adapters.forget(digest, send, self.requests.needed_adapters())

    async def residency(self) -> Mapping[str, Residency]:
        """Where the adapters are, by digest; what is absent is left out.

        Computed between two steps; empty while there is no engine. Raises NotReadyError if the
        engine does not reply in time.
        """
        return (await self.activity()).residency

    async def activity(self) -> AdapterActivity:
        """Return where the adapters are, and how many requests use and await them.

        Raises as `residency`.
        """
        return await self._activity.current(self._link)

    async def recent_activity(self) -> AdapterActivity:
        """activity(), or what it was last while the engine is in a long step."""
        return await self._activity.recent(self._link)

    @property
    def pinned(self) -> frozenset[str]:
        """Digests that are to stay on the device."""
        return frozenset(self._adapters.pinned)

    async def pin(self, source: AdapterSource) -> None:
        """Keep an adapter on the device, in every engine that runs, until `unpin` or unloading.

        Raises AdapterTooLargeError if others would no longer fit, NotReadyError without an engine
        or if it does not reply in time.
        """
        if source.digest in self._adapters.confirmed:
            return
        pinning = self._pinning.get(source.digest)
        if pinning is None:
            task = asyncio.create_task(self._pin(source), name=f"pin-{source.digest}")
            pinning = self._pinning[source.digest] = _Pinning(task)
            task.add_done_callback(lambda _: self._pinning.pop(source.digest))
        pinning.num_callers += 1
        try:
            await asyncio.shield(pinning.task)  # one caller that leaves must not end it for others
        finally:
            pinning.num_callers -= 1
            if not pinning.num_callers:
                pinning.task.cancel()

    async def _pin(self, source: AdapterSource) -> None:
        link, digest = self._require_link(), source.digest
        self._adapters.want(source, link.send)
        was_pinned = digest in self._adapters.pinned
        self._adapters.pinned[digest] = source
        try:
            error = await self._pin_replies.send(
                lambda query_id: link.send(PinAdapter(query_id, digest))
            )
        except BaseException:
            if not was_pinned:
                self.unpin(digest)
            raise
        if error is not None:
            self._adapters.pinned.pop(digest, None)
            raise error_from_info(error)
        if digest not in self._adapters.pinned:
            raise NotReadyError("the adapter was unpinned meanwhile", retry_after_seconds=1)
        self._adapters.confirmed.add(digest)

    def pin_later(self, source: AdapterSource) -> None:
        """Pin an adapter once the engine, or the next one, can; a refusal is logged."""
        self._adapters.pinned[source.digest] = source
        if self._link is not None:
            self._adapters.want(source, self._link.send)
            self._link.send(PinAdapter(_UNASKED, source.digest))

    def unpin(self, digest: str) -> None:
        """Undo `pin`. Adapters that were refused for lack of memory may be requested again."""
        self._adapters.confirmed.discard(digest)
        if self._adapters.pinned.pop(digest, None) is not None and self._link is not None:
            self._adapters.forgive()
            self._link.send(UnpinAdapter(digest))

    def preload(self, source: AdapterSource) -> None:
        """Load an adapter ahead of its first request."""
        link = self._require_link()
        self._adapters.want(source, link.send)
        link.send(PreloadAdapter(source.digest))

    def _require_link(self) -> EngineLink:
        if self._link is None or not self.is_ready:
            raise self._not_ready()
        return self._link

    def _not_ready(self) -> NotReadyError:
        return NotReadyError(
            f"the engine of model {self.model!r} is {self.state}", retry_after_seconds=2
        )

    async def _run(self) -> None:
        """Serve one engine after the other until closed, or until one cannot start."""
        try:
            await self._run_epochs()
        except Exception:
            logger.exception("model %s: its engine is given up", self.model)
            self.failure = InternalError(f"the engine of model {self.model!r} was given up")
        self.state = EngineState.FAILED
        self.requests.fail_all(engine_gone("was given up"))
        self._settled.set()

    async def _run_epochs(self) -> None:
        """Wait until the first engine runs or could not start; `failure` then has the reason."""
        pause = _FIRST_PAUSE_SECONDS
        for epoch in itertools.count(1):
            started_ns, self._has_worked = self._clock.now_ns(), False
            end = await self._run_epoch(epoch)
            if self._capacity is None:
                self.failure = self.failure or InternalError(
                    f"the engine of model {self.model!r} ended while it started: see its log"
                )
                return
            self.restarts[end] += 1
            lived_ns = self._clock.now_ns() - started_ns
            if self._has_worked or lived_ns > _STABLE_SECONDS * 1e9:
                pause = _FIRST_PAUSE_SECONDS
            logger.info("model %s: its engine is started again in %g s", self.model, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _run_epoch(self, epoch: int) -> EngineEnd:
        """One engine's life. Returns its end; then its requests wait for the next one."""
        try:
            link = await self._start_link(epoch)
        except LoraplexError as error:
            return self._cannot_start(error)
        except OSError as error:
            return self._cannot_start(InternalError(f"the engine cannot be started: {error}"))
        death = EngineDied("the engine was closed")
        self._watchdog.begin()
        watching = asyncio.create_task(self._watch(link), name=f"watchdog-{self.model}")
        try:
            while self.failure is None:
                self._handle(await link.receive(), link)
        except EngineDied as died:
            death = died
            logger.error("model %s: %s", self.model, death)
        finally:
            watching.cancel()
            try:
                self._lose_engine(death)
            finally:
                await link.close()
        return death.end

    async def _watch(self, link: EngineLink) -> None:
        """Kill an engine that hangs. Its death is then handled as any other."""
        while (progress := link.progress()) is not None:
            problem = self._watchdog.problem(progress)
            if problem:
                if self.state is EngineState.READY:
                    self.state = EngineState.RESTARTING
                link.kill(problem)
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _lose_engine(self, death: EngineDied) -> None:
        self._link = None
        self.problem = self.problem or str(death)
        self._adapters.lose_engine()
        gone = NotReadyError(f"the engine of model {self.model!r} stopped", retry_after_seconds=2)
        self._activity.lose_engine()
        self._pin_replies.fail(gone)
        self.stats = EngineStats()
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
        self.requests.lose_engine(death)

    def _handle(self, event: EngineEvent, link: EngineLink) -> None:
        match event:
            case StepDone():  # first, as nearly all are
                self._take_step(event)
            case EngineReady(capacity):
                if self.num_restarts:
                    logger.warning("model %s: its engine is back", self.model)
                self._capacity, self.problem = capacity, ""
                self.on_capacity(capacity)
                self._link = link
                self._watchdog.note_ready()
                self.state = EngineState.READY
                self._pin_again(link)
                self.requests.take_engine(link)
                self._settled.set()
            case EngineFailed(error):
                self._cannot_start(error_from_info(error))
            case AdaptersReport(query_id, activity, stats):
                self.stats = stats
                self._activity.resolve(query_id, activity)
            case AdapterPinned(query_id, error):
                self._note_pinned(query_id, error)
            case AdapterRejected(digest, error):
                self._note_rejected(digest, error)

    def _take_step(self, step: StepDone) -> None:
        self.stats = step.stats or self.stats
        if step.record is not None:
            self._has_worked = True
            self.steps.append(step.record)
            self._watchdog.note_step(step.record)
        self.requests.take_step(step)

    def _note_rejected(self, digest: str, error: ErrorInfo) -> None:
        if self._adapters.reject(digest, error):
            logger.warning("model %s refused adapter %s: %s", self.model, digest, error.message)

    def _note_pinned(self, query_id: int, error: ErrorInfo | None) -> None:
        if not self._pin_replies.resolve(query_id, error) and error is not None:
            logger.warning(
                "model %s: an adapter is no longer pinned on the device: %s",
                self.model,
                error.message,
            )

    def _pin_again(self, link: EngineLink) -> None:
        """A new engine has none of them."""
        for digest, source in self._adapters.pinned.items():
            self._adapters.want(source, link.send)
            link.send(PinAdapter(_UNASKED, digest))

    def _cannot_start(self, error: LoraplexError) -> EngineEnd:
        """An engine that has run before is tried again; one that never has is not."""
        self.problem = error.message
        if self._capacity is None:
            self.failure = error
        else:
            logger.error("model %s: the engine failed: %s", self.model, error.message)
        return EngineEnd.CRASH
