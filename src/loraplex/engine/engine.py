"""One model's engine: add and abort requests, step by step.

It joins the scheduler with a runner and a loader. It knows neither text nor tensors, and neither
threads nor processes: `engine.loop` calls it.
"""

import itertools
import logging
from typing import NamedTuple

import msgspec

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.clock import Clock
from loraplex.core.errors import (
    InvalidRequestError,
    LoraplexError,
    StepFailedError,
    TokenOutOfVocabularyError,
)
from loraplex.core.output import EngineOutput
from loraplex.core.plan import Capacity, StepPlan
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.sequence import Sequence, SequenceGroup
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord
from loraplex.engine.adapter_registry import AdapterRegistry
from loraplex.engine.runner import AdapterLoader, Runner
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.eviction import LRUPolicy, NewEvictionPolicy
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.policy import Policy
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.settings import SchedulerSettings

LOAD_POLL_NS = 1_000_000
"""How often an engine that has nothing else to do asks whether a load ended."""

logger = logging.getLogger(__name__)


class EngineTurn(NamedTuple):
    """What one call of `Engine.step` did."""

    outputs: tuple[EngineOutput, ...]
    record: StepRecord | None
    """None if no step was launched."""


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
        adapters: AdapterRegistry,
        clock: Clock,
    ) -> None:
        """See `build_engine` for parts that fit together."""
        self._scheduler = scheduler
        self._runner = runner
        self._loader = loader
        self._adapters = adapters
        self._clock = clock
        self._capacity = runner.capacity()
        self._sequence_ids = itertools.count(1)

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def register_adapter(self, source: AdapterSource) -> AdapterHandle:
        """Make a digest known; nothing is read yet.

        Raises AdapterTooLargeError if it could not even be served alone.
        """
        return self._adapters.register(source)

    def unregister_adapter(self, digest: str) -> bool:
        """Forget a digest and its copies. False and no change while a request needs it.

        Raises AdapterNotFoundError.
        """
        return self._adapters.unregister(digest)

    def forget_adapter(self, digest: str) -> None:
        """unregister_adapter, now or as soon as no request needs it. An unknown one is fine."""
        self._adapters.forget(digest)

    def adapter_activity(self) -> AdapterActivity:
        """Where the adapters are, and for whom."""
        return self._adapters.activity(
            self._scheduler.num_running_by_adapter(), self._scheduler.num_waiting_by_adapter()
        )

    def hold_adapter(self, digest: str) -> None:
        """Keep an adapter on the device, and bring it there.

        Raises AdapterNotFoundError, or AdapterTooLargeError if others would then lack room.
        """
        self._scheduler.hold(self._adapters.handle(digest))

    def release_adapter(self, digest: str) -> None:
        """Undo hold_adapter. An unknown one is fine."""
        if digest in self._adapters:
            self._scheduler.release(self._adapters.handle(digest))

    def preload(self, digest: str) -> None:
        """Bring an adapter to the device ahead of requests, as soon as no request wants the room.

        Raises AdapterNotFoundError.
        """
        self._scheduler.preload(self._adapters.handle(digest))

    def add(self, request: EngineRequest) -> None:
        """Take a request. Never raises: what is wrong with it is its only output."""
        try:
            group = self._group(request)
        except LoraplexError as error:
            self._scheduler.refuse(request, error)
        else:
            self._scheduler.add(group)

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End a request, or one sequence of it, with FinishReason.ABORT.

        No change if it ended already. Its slots, blocks and pins are free at once.
        """
        self._scheduler.abort(request_id, sequence_index)

    def step(self) -> EngineTurn:
        """Plan, launch, wait, absorb; without a launch if there is nothing to compute."""
        self._poll_loads()
        turn = self._turn()
        self._adapters.forget_unneeded()
        return turn

    def _turn(self) -> EngineTurn:
        plan = self._scheduler.plan()
        if plan is None:
            return EngineTurn(tuple(self._scheduler.take_outputs()), None)
        start_ns = self._clock.now_ns()
        record = self._scheduler.record(start_ns)
        outputs = self._run(plan)
        duration_ns = self._clock.now_ns() - start_ns
        return EngineTurn(outputs, msgspec.structs.replace(record, duration_ns=duration_ns))

    def next_wake_ns(self) -> int | None:
        """When to call `step` again if nothing is added before; None: not until then."""
        wake_ns = self._scheduler.next_wake_ns()
        if not self._scheduler.num_loading:
            return wake_ns
        poll_ns = self._clock.now_ns() + LOAD_POLL_NS
        return poll_ns if wake_ns is None else min(wake_ns, poll_ns)

    def next_expiry_ns(self) -> int | None:
        """When to call `step` so that an idle adapter may leave; None: none would."""
        return self._scheduler.next_expiry_ns()

    @property
    def is_idle(self) -> bool:
        """No request, load or copy is unfinished, and there is nothing left to say."""
        return not self._scheduler.has_unfinished and self.next_wake_ns() is None

    def check(self) -> None:
        """Assert that nothing is lost or counted twice; when idle, that everything is back."""
        self._scheduler.check()
        if self.is_idle:
            stats = self._scheduler.stats()
            assert stats.blocks_held == 0, "idle, and blocks are held"
            assert stats.num_running == stats.num_waiting == 0, "idle, and sequences are left"

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def close(self) -> None:
        """Let go of the runner and the loader."""
        self._loader.close()
        self._runner.close()

    def _run(self, plan: StepPlan) -> tuple[EngineOutput, ...]:
        try:
            result = self._runner.launch(plan).wait()
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            if not isinstance(error, LoraplexError):
                error = StepFailedError(
                    "a step of the model failed; the server's log has the cause"
                )
            return tuple(self._scheduler.fail(plan, error))
        return tuple(self._scheduler.absorb(plan, result))

    def _poll_loads(self) -> None:
        for load in self._loader.poll():
            if load.error is None:
                self._scheduler.loaded(load.handle, load.load_ns)
            else:
                self._scheduler.load_failed(load.handle, load.error)

    def _group(self, request: EngineRequest) -> SequenceGroup:
        """The request's sequences. Raises a LoraplexError for a request that cannot be served."""
        request.sampling.validate()
        self._check_tokens(request.prompt_token_ids)
        adapters = self._adapters.resolve(request.adapters)
        if request.requires_resident:
            self._adapters.require_resident(request.adapters, self._scheduler.is_preloading)
        seed = request.request_id if request.sampling.seed is None else request.sampling.seed
        sequences = [
            Sequence(
                sequence_id=next(self._sequence_ids),
                index=index,
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                seed=seed,
            )
            for index in range(request.sampling.n)
        ]
        return SequenceGroup(request, sequences, adapters)

    def _check_tokens(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens; at least one is needed")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._capacity.vocab_size:
                raise TokenOutOfVocabularyError(
                    f"token {token_id} is not in the model's vocabulary of "
                    f"{self._capacity.vocab_size} tokens"
                )


def build_engine(
    runner: Runner,
    loader: AdapterLoader,
    clock: Clock,
    settings: SchedulerSettings | None = None,
    *,
    adapter_host_bytes: int,
    eviction_policy: NewEvictionPolicy = LRUPolicy,
    policy: Policy | None = None,
) -> Engine:
    """An engine around a runner: its pools are as large as Runner.capacity() says.

    `adapter_host_bytes` bounds the host tier of adapters; `eviction_policy` says which of them
    leave a full tier first, `policy` which requests come first. Raises ConfigError if the settings
    do not suit the runner.
    """
    capacity = runner.capacity()
    settings = settings or SchedulerSettings()
    kv = KVBlocks(
        capacity.num_blocks, capacity.block_size, prefix_caching=settings.enable_prefix_cache
    )
    cache = AdapterCache(
        adapter_host_bytes,
        capacity.num_adapter_pages,
        keeps_host_copy=capacity.keeps_host_copy,
        new_policy=eviction_policy,
    )
    adapters = AdapterRegistry(cache, loader, capacity.page_geometry)
    scheduler = Scheduler(capacity, settings, kv, cache, adapters, clock, policy)
    return Engine(scheduler, runner, loader, adapters, clock)
