"""Who is in the engine, and what each one holds: slots, KV blocks, pins.

The state that planning and absorbing share. Every change of a sequence's status happens here, and
what was taken with a slot is given back in one place.
"""

import dataclasses
from collections import Counter

from loraplex.core.adapter import AdapterHandle
from loraplex.core.clock import Clock
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import FinishReason
from loraplex.core.request import RequestId
from loraplex.core.sequence import SequenceStatus
from loraplex.memory.kv_blocks import Admission, KVBlocks
from loraplex.scheduling.active import ActiveRequest, ActiveSequence
from loraplex.scheduling.adapters import AdapterDemand
from loraplex.scheduling.admission import QueueBound
from loraplex.scheduling.outbox import Outbox
from loraplex.scheduling.queues import RunningSet, WaitingQueue
from loraplex.scheduling.slots import SlotPool


@dataclasses.dataclass(slots=True)
class Counts:
    """Since the start; the names are those of EngineStats."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


class Roster:
    """Invariant: a sequence holds a slot, blocks and pins exactly while it is RUNNING.

    With more than one plan in flight, what a launched plan names must not be given back before it
    is absorbed: `_vacate` is the only place that gives back.
    """

    def __init__(
        self,
        kv: KVBlocks,
        adapters: AdapterDemand,
        slots: SlotPool,
        queue_bound: QueueBound,
        clock: Clock,
    ) -> None:
        self.kv = kv
        self.adapters = adapters
        self.slots = slots
        self.queue_bound = queue_bound
        self.clock = clock
        self.waiting = WaitingQueue()
        self.running = RunningSet()
        self.outbox = Outbox()
        self.counts = Counts()
        self._requests: dict[RequestId, ActiveRequest] = {}
        self._num_unfinished = 0

    @property
    def is_empty(self) -> bool:
        return not self._requests

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot; also those that wait for another one of their request."""
        return self._num_unfinished - len(self.running)

    def find(self, request_id: RequestId) -> ActiveRequest | None:
        """None if it ended, or never was."""
        return self._requests.get(request_id)

    def accept(self, request: ActiveRequest, *, hold_back: bool) -> None:
        """A new request. With hold_back, all sequences but one wait until it has the prompt."""
        assert request.request_id not in self._requests, f"request {request.request_id} came twice"
        self._requests[request.request_id] = request
        self._num_unfinished += request.num_unfinished
        self.queue_bound.enter()
        self.adapters.want(request.handles)
        first, *others = request.sequences
        self.waiting.add(first)
        request.held_back = others
        if not hold_back:
            self.release_held_back(request)

    def release_held_back(self, request: ActiveRequest) -> None:
        for active in request.held_back:
            self.waiting.add(active)
        request.held_back = []

    def seat(self, active: ActiveSequence, admission: Admission) -> None:
        """WAITING -> RUNNING, with these blocks. There must be a free slot."""
        sequence = active.sequence
        self.waiting.remove(active)
        self.adapters.pin(active.request.handles)
        sequence.slot = self.slots.allocate()
        assert sequence.slot is not None, "no free slot"
        sequence.block_ids = admission.block_ids
        sequence.num_cached_tokens = admission.num_cached_tokens
        sequence.num_computed_tokens = admission.num_cached_tokens
        sequence.num_hashed_blocks = admission.num_cached_tokens // self.kv.block_size
        sequence.become(SequenceStatus.RUNNING)
        active.num_tokens_at_admission = sequence.num_tokens
        self.running.add(active)
        if sequence.num_preemptions == 0:
            self.counts.prompt_tokens += sequence.num_prompt_tokens
            self.counts.cached_tokens += sequence.num_cached_tokens

    def preempt(self, active: ActiveSequence) -> None:
        """RUNNING -> WAITING: its KV is computed again later, or found in the prefix cache."""
        self._vacate(active)
        active.sequence.num_preemptions += 1
        active.sequence.become(SequenceStatus.WAITING)
        self.waiting.add(active)
        self.counts.preemptions += 1

    def end_sequence(self, active: ActiveSequence, reason: FinishReason) -> None:
        """One sequence ends; its request ends with its last one."""
        request = active.request
        self._end(active, reason)
        if request.num_unfinished == 0:
            self._end_request(request, None)
        elif request.num_unfinished == len(request.held_back):
            # The one that the others waited for is gone: the next one takes its place.
            self.waiting.add(request.held_back.pop(0))

    def fail_request(self, request: ActiveRequest, error: ErrorInfo) -> None:
        for active in request.sequences:
            if not active.is_finished:
                self._end(active, FinishReason.ERROR)
        self._end_request(request, error)

    def fail_waiting_for(self, handle: AdapterHandle) -> None:
        """The adapter is FAILED: those that wait for it end; a later request may try again."""
        error = self.adapters.refusal((handle,), self.clock.now_ns())
        if error is None:
            return
        lanes = self.waiting.lanes_with(handle)
        for request in dict.fromkeys(active.request for lane in lanes for active in lane):
            self.fail_request(request, error.to_info())

    def check(self) -> None:
        """Nothing is lost and nothing is counted twice. While no plan is in flight."""
        running = [active.sequence for active in self.running]
        self.slots.check([sequence.slot for sequence in running if sequence.slot is not None])
        self.kv.check([sequence.block_ids for sequence in running])
        self.waiting.check()
        self.adapters.check(Counter(h for active in self.running for h in active.request.handles))
        requests = self._requests.values()
        self.queue_bound.check(sum(not request.was_scheduled for request in requests))
        held_back = [active for request in requests for active in request.held_back]
        placed = [*self.running, *self.waiting, *held_back]
        alive = [a for request in requests for a in request.sequences if not a.is_finished]
        assert len(placed) == len(alive) == self._num_unfinished
        assert set(placed) == set(alive), "a sequence is in no queue, or in two"
        assert all(request.num_unfinished > 0 for request in requests), "an ended request"
        runs = set(self.running)
        for active in alive:
            active.check(runs=active in runs)

    def _vacate(self, active: ActiveSequence) -> None:
        """Give back everything that a running sequence holds."""
        sequence = active.sequence
        assert sequence.slot is not None
        self.running.remove(active)
        self.slots.release(sequence.slot)
        self.kv.release(sequence.block_ids)
        self.adapters.unpin(active.request.handles)
        sequence.slot = None
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_hashed_blocks = 0

    def _end(self, active: ActiveSequence, reason: FinishReason) -> None:
        sequence, request = active.sequence, active.request
        if sequence.status is SequenceStatus.RUNNING:
            self._vacate(active)
        elif active in request.held_back:
            request.held_back.remove(active)
        else:
            self.waiting.remove(active)
        sequence.finish_reason = reason
        sequence.become(SequenceStatus.FINISHED)
        request.num_unfinished -= 1
        self._num_unfinished -= 1

    def _end_request(self, request: ActiveRequest, error: ErrorInfo | None) -> None:
        del self._requests[request.request_id]
        self.adapters.unwant(request.handles)
        if request.was_scheduled:
            service_ns = self.clock.now_ns() - request.group.first_scheduled_ns
            self.queue_bound.served(service_ns)
        else:
            self.queue_bound.leave()
        self.outbox.finished(request, error)
