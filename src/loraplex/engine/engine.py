"""Engine of one model: add and abort requests, and compute them step by step.

It joins the scheduler with a runner and a loader. It handles neither text nor tensors, and neither
threads nor processes: `engine.loop` calls it.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from loraplex.core.adapter import AdapterHandle, AdapterSource, AdapterUse, Residency, not_in_cache
from loraplex.core.clock import Clock
from loraplex.core.errors import (
    AdapterNotFoundError,
    ConfigError,
    DeviceLost,
    ErrorInfo,
    InvalidRequestError,
    LoraplexError,
    StepFailedError,
)
from loraplex.core.output import EngineOutput
from loraplex.core.plan import Capacity, StepPlan, StepResult
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord
from loraplex.core.version import __version__
from loraplex.engine.journal import (
    CommandTaken,
    Journal,
    JournalHeader,
    LoadEnded,
    PlanMade,
    StepEnded,
)
from loraplex.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineCommand,
    PinAdapter,
    PreloadAdapter,
    RegisterAdapter,
    UnpinAdapter,
    UnregisterAdapter,
)
from loraplex.engine.runner import AdapterLoader, RankProbes, Runner, StepHandle
from loraplex.engine.step_marker import MAX_STEPS, StepMarker
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.adapter_pages import most_pages
from loraplex.memory.eviction import EVICTION_POLICIES
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.scheduler import Scheduler

LOAD_POLL_NS = 1_000_000
"""Interval at which an otherwise idle engine checks whether a load ended."""

logger = logging.getLogger(__name__)


_VOID = StepFailedError("the step before it failed").to_info()


class EngineTurn(NamedTuple):
    """Result of one call of `Engine.step`."""

    outputs: tuple[EngineOutput, ...]
    record: StepRecord | None
    """None if no step was launched."""


class EventClock:
    """Clock that stands still within one event of the engine.

    So the decisions of the control plane are a function of its inputs and of the readings of
    `tick`, and can be replayed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ns = clock.now_ns()

    def tick(self) -> int:
        """Begin a new event: read the time."""
        self._now_ns = self._clock.now_ns()
        return self._now_ns

    def now_ns(self) -> int:
        return self._now_ns


class AdapterHandles:
    """Handle of each digest, and its source. Starts the loads that the scheduler requests.

    Implements scheduling's HostLoads. The adapter cache knows where an adapter is.
    """

    def __init__(
        self,
        cache: AdapterCache,
        loader: AdapterLoader,
        capacity: Capacity,
    ) -> None:
        self._capacity = capacity
        self._cache = cache
        self._loader = loader
        self._handles: dict[str, AdapterHandle] = {}
        self._sources: dict[AdapterHandle, AdapterSource] = {}
        self._leaving: set[str] = set()
        """Digests to forget as soon as no request needs them."""
        self._next_handle = 1

    def register(self, source: AdapterSource) -> AdapterHandle:
        """Return the handle of a digest, a new one for a new digest.

        A known digest keeps its handle, and from now on is read from the newly named file. Raises
        AdapterTooLargeError if the adapter does not fit even alone.
        """
        self._leaving.discard(source.digest)
        handle = self._handles.get(source.digest)
        if handle is None:
            handle = self._next_handle
            capacity = self._capacity
            pages = most_pages(capacity.held(source.targets), capacity.page_geometry)
            num_bytes = pages * capacity.host_page_bytes or source.num_bytes
            self._cache.register(handle, num_bytes, pages)
            self._next_handle += 1
            self._handles[source.digest] = handle
        self._sources[handle] = source
        return handle

    def unregister(self, digest: str) -> bool:
        """Forget a digest and its copies. False and no change while it is in use or loading.

        Raises AdapterNotFoundError.
        """
        handle = self.handle(digest)
        dropped = self._cache.forget(handle)
        if dropped is None:
            return False
        for dropped_handle in dropped:
            self._loader.discard(dropped_handle)
        del self._handles[digest], self._sources[handle]
        self._leaving.discard(digest)
        return True

    def forget(self, digest: str) -> None:
        """Unregister a digest now, or as soon as no request needs it, if it is known."""
        if digest in self._handles and not self.unregister(digest):
            self._cache.unpin(self._handles[digest])
            self._leaving.add(digest)

    def forget_unneeded(self) -> None:
        """Unregister the digests to forget that no request needs any longer."""
        for digest in list(self._leaving):
            self.unregister(digest)

    def activity(
        self, running: Mapping[AdapterHandle, int], waiting: Mapping[AdapterHandle, int]
    ) -> AdapterActivity:
        """Report the adapters; running, waiting: numbers of sequences by adapter."""
        digests = {handle: digest for digest, handle in self._handles.items()}
        residency = {handle: self._cache.residency(handle) for handle in digests}
        return AdapterActivity(
            residency={
                digests[handle]: where
                for handle, where in residency.items()
                if where is not Residency.ABSENT
            },
            running={digests[handle]: number for handle, number in running.items()},
            waiting={digests[handle]: number for handle, number in waiting.items()},
            pinned=tuple(d for handle, d in digests.items() if self._cache.is_pinned(handle)),
            leaving={digests[handle]: pages for handle, pages in self._cache.leaving().items()},
        )

    def __contains__(self, digest: str) -> bool:
        return digest in self._handles

    def require_resident(
        self, uses: Iterable[AdapterUse], is_preloading: Callable[[AdapterHandle], bool]
    ) -> None:
        """Raise AdapterNotFoundError if one is in no tier and not preloading."""
        for use in uses:
            handle = self.handle(use.digest)
            is_away = self._cache.residency(handle) in (Residency.ABSENT, Residency.FAILED)
            if is_away and not is_preloading(handle):
                raise not_in_cache(f"the adapter {use.digest[:12]}")

    def handle(self, digest: str) -> AdapterHandle:
        """Return the handle of a digest. Raises AdapterNotFoundError."""
        handle = self._handles.get(digest)
        if handle is None:
            raise AdapterNotFoundError(f"this engine has no adapter with digest {digest}")
        return handle

    def digest(self, handle: AdapterHandle) -> str:
        return self._sources[handle].digest

    def resolve(self, uses: Iterable[AdapterUse]) -> tuple[tuple[AdapterHandle, float], ...]:
        """Return (handle, scale) of each adapter of a request.

        Raises AdapterNotFoundError, or AdapterTooLargeError if they do not fit together.
        """
        resolved = tuple((self.handle(use.digest), use.scale) for use in uses)
        if resolved:
            self._cache.require_fit(handle for handle, _ in resolved)
        return resolved

    def start_load(self, handle: AdapterHandle) -> None:
        self._loader.start(handle, self._sources[handle])

    def discard(self, handle: AdapterHandle) -> None:
        self._loader.discard(handle)


class _NotLaunched:
    """StepHandle of a plan that the runner refused."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


class _LaunchedStep(NamedTuple):
    """Plan that was launched and not absorbed yet."""

    plan: StepPlan
    record: StepRecord
    handle: StepHandle


class Engine:
    """One thread calls it; it takes no locks.

    Every request that was added ends in exactly one output with `finished`, whatever happens. A
    row that fails ends its request, and a step that fails ends the requests that were in it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        loader: AdapterLoader,
        adapters: AdapterHandles,
        clock: EventClock,
        journal: Journal | None,
        ranks: RankProbes | None = None,
    ) -> None:
        """See `build_engine` for parts that fit together. The clock is the scheduler's own."""
        self.ranks = ranks
        self._scheduler = scheduler
        self._runner = runner
        self._loader = loader
        self._adapters = adapters
        self._clock = clock
        self._journal = journal
        self.capacity = runner.capacity()
        self._num_loads_ended = 0
        self._launched: deque[_LaunchedStep] = deque()
        """Steps in flight, the oldest first."""
        self._marker = StepMarker()
        self._rank_wait_ns: tuple[int, ...] = ()
        self._step_ns = 0

    def mark_steps(self, marker: StepMarker) -> None:
        """Use a marker that notes which requests the steps in flight compute."""
        self._marker = marker

    def register_adapter(self, source: AdapterSource) -> AdapterHandle:
        """Make a digest known; nothing is read yet.

        Raises AdapterTooLargeError if it could not even be served alone.
        """
        self._take(RegisterAdapter(source))
        return self._adapters.register(source)

    def forget_adapter(self, digest: str) -> None:
        """Forget a digest and its copies, now or as soon as no request needs it.

        An unknown one is fine.
        """
        self._take(UnregisterAdapter(digest))
        self._adapters.forget(digest)

    def adapter_activity(self) -> AdapterActivity:
        """Return the place and the use of each adapter."""
        return self._adapters.activity(
            self._scheduler.adapters.running, self._scheduler.num_waiting_by_adapter()
        )

    def pin_adapter(self, digest: str) -> None:
        """Keep an adapter on the device, and bring it there.

        Raises AdapterNotFoundError, or AdapterTooLargeError if others would then not fit.
        """
        self._take(PinAdapter(0, digest))
        self._scheduler.adapters.pin(self._adapters.handle(digest))

    def unpin_adapter(self, digest: str) -> None:
        """Undo pin_adapter. An unknown one is fine."""
        self._take(UnpinAdapter(digest))
        if digest in self._adapters:
            self._scheduler.adapters.unpin(self._adapters.handle(digest))

    def preload(self, digest: str) -> None:
        """Bring an adapter to the device ahead of requests, once no request needs the memory.

        Raises AdapterNotFoundError.
        """
        self._take(PreloadAdapter(digest))
        self._scheduler.adapters.preload(self._adapters.handle(digest))

    def add(self, request: EngineRequest) -> None:
        """Take an admitted request. Never raises: a refused one gets an error as only output."""
        self._take(AddRequest(request))
        try:
            # Admission has checked all values: every request waits for what is checked here.
            if not request.prompt_token_ids:  # no step could compute it
                raise InvalidRequestError("the prompt has no tokens; at least one is needed")
            adapters = self._adapters.resolve(request.adapters)
            if request.requires_resident:
                is_preloading = self._scheduler.adapters.is_preloading
                self._adapters.require_resident(request.adapters, is_preloading)
        except LoraplexError as error:
            self._scheduler.refuse(request, error)
        else:
            self._scheduler.add(request, adapters)

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End a request, or one sequence of it, with FinishReason.ABORT.

        No change if it ended already. Its slots and blocks are free at once, or when the in-flight
        step that uses them has ended.
        """
        self._take(AbortRequest(request_id, sequence_index))
        self._scheduler.abort(request_id, sequence_index)

    def step(self) -> EngineTurn:
        """Plan and launch steps, then wait for the oldest one and absorb it, if there is one.

        Steps are launched until the maximum is in flight, or nothing more can be planned. With a
        maximum of one, each call launches and absorbs one step.
        """
        while len(self._launched) < self._scheduler.max_in_flight:
            plan = self._plan()
            if plan is None:
                break
            self._launched.append(self._launch(plan))
        if self._launched:
            turn = self._absorb(self._launched.popleft())
        else:
            turn = EngineTurn(tuple(self._scheduler.take_outputs()), None)
        self._adapters.forget_unneeded()
        return turn

    def next_wake_ns(self) -> int | None:
        """Return when to call `step` again if nothing is added; None: only after an event."""
        self._clock.tick()
        wake_ns = self._scheduler.next_wake_ns()
        if not self._scheduler.adapters.num_loading:
            return wake_ns
        poll_ns = self._clock.now_ns() + LOAD_POLL_NS
        return poll_ns if wake_ns is None else min(wake_ns, poll_ns)

    def next_expiry_ns(self) -> int | None:
        """Return when to call `step` so that an idle adapter may leave; None: none would."""
        return self._scheduler.adapters.next_expiry_ns()

    @property
    def is_idle(self) -> bool:
        """Whether no request, load or copy is unfinished, and no output is pending."""
        return not self._scheduler.has_unfinished and self.next_wake_ns() is None

    def check(self) -> None:
        """Assert that nothing is lost or counted twice; when idle, that everything is free."""
        self._scheduler.check()
        if self.is_idle:
            stats = self._scheduler.stats()
            assert stats.blocks_held == 0, "idle, and blocks are held"
            assert stats.num_running == stats.num_waiting == 0, "idle, and sequences are left"

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        return msgspec.structs.replace(
            stats, step_ns=self._step_ns, rank_wait_ns=self._rank_wait_ns
        )

    def close(self) -> None:
        """Close the loader, the runner and the journal. Raises an error once all are closed."""
        with contextlib.ExitStack() as stack:  # closes the last one first
            if self._journal is not None:
                stack.callback(self._journal.close)
            stack.callback(self._runner.close)
            stack.callback(self._loader.close)

    def _take(self, command: EngineCommand) -> None:
        """Write a command to the journal. All its consequences see one time."""
        now_ns = self._clock.tick()
        if self._journal is not None:
            self._journal.write(CommandTaken(now_ns, command))

    def _plan(self) -> StepPlan | None:
        now_ns = self._clock.tick()
        loads = tuple(
            LoadEnded(load.handle, load.error, load.load_ns) for load in self._loader.poll()
        )
        self._num_loads_ended += len(loads)
        plan: StepPlan | None = None
        try:
            for load in loads:
                if load.error is None:
                    self._scheduler.loaded(load.handle, load.load_ns)
                else:
                    self._scheduler.load_failed(load.handle, load.error)
            plan = self._scheduler.plan()
        finally:
            if self._journal is not None:
                self._journal.write(PlanMade(now_ns, loads, plan))
        return plan

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        record = self._scheduler.record(plan, self._clock.now_ns(), self._adapters.digest)
        if self._num_loads_ended:
            record = msgspec.structs.replace(record, adapter_loads_ended=self._num_loads_ended)
            self._num_loads_ended = 0
        self._marker.begin(plan.step_id, record.request_ids, record.num_tokens)
        try:
            return _LaunchedStep(plan, record, self._runner.launch(plan))
        except Exception as error:
            return _LaunchedStep(plan, record, _NotLaunched(error))

    def _absorb(self, step: _LaunchedStep) -> EngineTurn:
        """Wait for a step and absorb its result."""
        plan = step.plan
        try:
            result = step.handle.wait()
        except DeviceLost:
            raise
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            return self._fail(step, error)
        self._take_end(result)
        self._rank_wait_ns = result.timing.rank_wait_ns
        outputs = self._scheduler.absorb(plan, result)
        self._marker.end(plan.step_id)
        return EngineTurn(tuple(outputs), self._ended(step, result))

    def _take_end(self, result: StepResult | None = None, error: ErrorInfo | None = None) -> None:
        """Write the end of a step to the journal. All its consequences see one time."""
        now_ns = self._clock.tick()
        if self._journal is not None:
            self._journal.write(StepEnded(now_ns, result, error))

    def _fail(self, step: _LaunchedStep, error: Exception) -> EngineTurn:
        if not isinstance(error, LoraplexError):
            error = StepFailedError("a step of the model failed; the server's log has the cause")
        self._take_end(error=error.to_info())
        outputs = self._scheduler.fail(step.plan, error)
        self._marker.end(step.plan.step_id)
        while self._launched:
            outputs += self._void(self._launched.popleft())
        return EngineTurn(tuple(outputs), self._ended(step, None))

    def _void(self, step: _LaunchedStep) -> list[EngineOutput]:
        """Discard a step that was launched after one that failed."""
        with contextlib.suppress(Exception):
            step.handle.wait()
        self._take_end(error=_VOID)
        outputs = self._scheduler.void(step.plan)
        self._marker.end(step.plan.step_id)
        return outputs

    def _ended(self, step: _LaunchedStep, result: StepResult | None) -> StepRecord:
        duration_ns = self._clock.now_ns() - step.record.start_ns
        self._step_ns += duration_ns
        return _ended_record(step.record, step.plan, result, duration_ns)


def build_engine(
    runner: Runner,
    loader: AdapterLoader,
    clock: Clock,
    settings: SchedulerSettings | None = None,
    *,
    adapter_host_bytes: int,
    eviction_policy: str = "lru",
    journal: Journal | None = None,
    overlap: bool = False,
    ranks: RankProbes | None = None,
) -> Engine:
    """Return an engine around a runner, with the pool sizes of Runner.capacity().

    `adapter_host_bytes` limits the host tier of adapters, and `eviction_policy` (one of
    EVICTION_POLICIES) chooses which of them leave a full tier first. The inputs and plans are
    written to `journal`. With `overlap` or several stages, steps are planned while others run; then
    the runner's `launch` should return at once. ranks: those that the runner and the loader have in
    addition to this process; None: none. Raises ConfigError if the settings do not suit the
    runner, or if the journal cannot be written.
    """
    capacity = runner.capacity()
    if capacity.num_stages + overlap > MAX_STEPS:
        raise ConfigError(
            f"at most {MAX_STEPS} plans may be in flight; {capacity.num_stages} pipeline stages"
            f"{' and overlap' if overlap else ''} need {capacity.num_stages + overlap}",
            param="pipeline_parallel_size",
        )
    settings = settings or SchedulerSettings()
    event_clock = EventClock(clock)
    kv = KVBlocks(
        capacity.block_size,
        capacity.cache_groups,
        prefix_caching=settings.enable_prefix_cache,
        state_checkpoint_tokens=settings.state_checkpoint_tokens,
    )
    if settings.enable_prefix_cache and not kv.prefix_caching:
        logger.warning(
            "the prefix cache is off: no layer of this model keeps all positions of a prompt"
        )
    cache = AdapterCache(
        adapter_host_bytes,
        capacity.num_adapter_pages,
        keeps_host_copy=capacity.keeps_host_copy,
        new_policy=EVICTION_POLICIES[eviction_policy],
    )
    adapters = AdapterHandles(cache, loader, capacity)
    scheduler = Scheduler(capacity, settings, kv, cache, adapters, event_clock, overlap=overlap)
    if journal is not None:
        journal.begin(
            JournalHeader(
                loraplex=__version__,
                capacity=capacity,
                settings=settings,
                adapter_host_bytes=adapter_host_bytes,
                eviction_policy=eviction_policy,
                overlap=overlap,
            )
        )
    return Engine(scheduler, runner, loader, adapters, event_clock, journal, ranks)


def _ended_record(
    record: StepRecord, plan: StepPlan, result: StepResult | None, duration_ns: int
) -> StepRecord:
    """Return the record with the step's result; None: the step failed."""
    if result is None:
        return msgspec.structs.replace(
            record, duration_ns=duration_ns, num_failed_rows=len(plan.rows)
        )
    return msgspec.structs.replace(
        record,
        duration_ns=duration_ns,
        num_accepted_tokens=sum(_num_accepted(plan, result)),
        num_new_tokens=sum(len(row.token_ids) for row in result.rows),
        num_failed_rows=sum(row.error is not None for row in result.rows),
        adapter_copies_ended=len(result.copies_done) + len(result.copies_failed),
        timing=result.timing,
    )


def _num_accepted(plan: StepPlan, result: StepResult) -> Iterator[int]:
    for row, row_result in zip(plan.rows, result.rows, strict=True):
        if row.draft_token_ids and row_result.token_ids:
            yield len(row_result.token_ids) - 1
