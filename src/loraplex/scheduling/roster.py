"""Who is in the engine, and what each one holds: slots, KV blocks, pins.

The state that planning and absorbing share. Every change of a sequence's status happens here, and
what was taken with a slot is given back in one place.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

from loraplex.core.adapter import AdapterHandle
from loraplex.core.clock import Clock
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import FinishReason
from loraplex.core.plan import BlockId, BlockTransfer, Slot
from loraplex.core.request import RequestId
from loraplex.core.sequence import SequenceStatus
from loraplex.memory.kv_blocks import Admission, KVBlocks, Loaded
from loraplex.scheduling.active import ActiveRequest, ActiveSequence, OffloadedKV
from loraplex.scheduling.adapters import CacheFiller
from loraplex.scheduling.admission import QueueBound
from loraplex.scheduling.fair_share import FairShares
from loraplex.scheduling.outbox import Outbox
from loraplex.scheduling.queues import RunningSet, WaitingQueue
from loraplex.scheduling.reservations import BlockReservations
from loraplex.scheduling.slots import SlotPool


@dataclasses.dataclass(slots=True)
class Counts:
    """Since the start; the names are those of EngineStats."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


class _Holdings(NamedTuple):
    """Of a sequence with a slot; its pins are one for each of its adapters."""

    slot: Slot
    block_ids: list[BlockId]


class Roster:
    """Invariant: a sequence holds a slot, blocks and pins exactly while it is RUNNING or in flight.

    What a launched plan names is not given back before it has landed: `_vacate` is the only place
    that gives back, then or later.
    """

    def __init__(
        self,
        kv: KVBlocks,
        adapters: CacheFiller,
        slots: SlotPool,
        queue_bound: QueueBound,
        clock: Clock,
        shares: FairShares,
        reservations: BlockReservations | None = None,
    ) -> None:
        """reservations: of the blocks that running sequences will take; None: none are made."""
        self.kv = kv
        self.adapters = adapters
        self.slots = slots
        self.queue_bound = queue_bound
        self.clock = clock
        self.shares = shares
        self.reservations = reservations
        self.waiting = WaitingQueue(shares.counter, shares.resident_lead)
        self.running = RunningSet()
        self.outbox = Outbox()
        self.counts = Counts()
        self._requests: dict[RequestId, ActiveRequest] = {}
        self._num_unfinished = 0
        self._leaving: dict[ActiveSequence, _Holdings] = {}
        """They run no longer, and a plan in flight has rows of them."""

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
        engine_request = request.group.request
        request.share = self.shares.key(engine_request, request.handles)
        self.shares.enter(request.share, engine_request.share_weight, self.waiting.shares)
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
        self._take_slot(active, admission.block_ids)
        sequence.num_cached_tokens = admission.num_cached_tokens
        sequence.num_computed_tokens = admission.num_cached_tokens
        sequence.num_hashed_blocks = admission.num_cached_tokens // self.kv.block_size
        if sequence.num_preemptions == 0 and admission.block_ids:
            self.counts.prompt_tokens += sequence.num_prompt_tokens
            self.counts.cached_tokens += sequence.num_cached_tokens
            self._charge(active, max(0, sequence.num_prompt_tokens - sequence.num_cached_tokens), 0)

    def seat_again(self, active: ActiveSequence, loaded: Loaded) -> None:
        """WAITING -> RUNNING, with the KV that went to the host when it was preempted."""
        offloaded, active.offloaded = active.offloaded, None
        assert offloaded is not None, "its KV is not on the host"
        self._take_slot(active, loaded.block_ids)
        active.sequence.num_computed_tokens = offloaded.num_computed_tokens
        active.sequence.num_hashed_blocks = loaded.num_hashed_blocks

    def served(self, active: ActiveSequence, num_output_tokens: int) -> None:
        """A sequence has so many tokens more."""
        self._charge(active, 0, num_output_tokens)

    def grow(self, active: ActiveSequence, num_tokens: int) -> list[BlockId] | None:
        """The blocks that a running sequence's table gets so that num_tokens tokens fit.

        None and no change if there are too few.
        """
        block_ids = active.sequence.block_ids
        new_block_ids = self.kv.grow(block_ids, num_tokens)
        if new_block_ids:
            block_ids.extend(new_block_ids)
            if self.reservations is not None:
                self.reservations.took(active, len(new_block_ids))
        return new_block_ids

    def num_blocks_to_leave(self, active: ActiveSequence, num_taken: int) -> int | None:
        """Blocks that must stay available if a sequence is seated now, with the other beams of its
        search, and takes num_taken; None: there is no room whatever is available.
        """
        if self.reservations is not None:
            return self.reservations.num_to_leave(active, num_taken)
        if not self.running:
            return 0
        # One block for each running row, or this one would soon be preempted for it.
        beams = active.request.beams
        return len(self.running) + (0 if beams is None else beams.width)

    def preempt(
        self, active: ActiveSequence, *, may_offload: bool = True
    ) -> tuple[BlockTransfer, ...]:
        """RUNNING -> WAITING; the transfers to plan so that its KV is kept on the host.

        None of them if it may not go there, or the host has no room: then the KV is computed again
        later, or found in the prefix cache.
        """
        assert not active.num_in_flight, "preempted while in flight"
        transfers = self._offload(active) if may_offload else ()
        self.requeue(active)
        return transfers

    def requeue(self, active: ActiveSequence) -> None:
        """RUNNING -> WAITING: what it has computed is of no use.

        The beams of a search lose their slots together, and the first one waits for all.
        """
        request = active.request
        together = [active] if request.beams is None else request.sequences
        for one in together:
            self._vacate(one)
            one.sequence.num_preemptions += 1
            one.sequence.become(SequenceStatus.WAITING)
            self.counts.preemptions += 1
        self.waiting.add(together[0])
        if request.beams is not None:
            request.held_back = together[1:]

    def landed(self, active: ActiveSequence) -> None:
        """A plan with a row of it has landed."""
        active.num_in_flight -= 1
        if not active.num_in_flight and active in self._leaving:
            self._give_back(active, self._leaving.pop(active))

    def forget_offloaded(self, active: ActiveSequence) -> None:
        """What is on the host is of no use any more: its KV is computed again."""
        if active.offloaded is not None:
            self.kv.free_host(active.offloaded.host_block_ids)
            active.offloaded = None

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
        for request in self.waiting_for(handle):
            self.fail_request(request, error.to_info())

    def waiting_for(self, handle: AdapterHandle) -> tuple[ActiveRequest, ...]:
        """The requests with waiting sequences that need an adapter."""
        lanes = self.waiting.lanes_with(handle)
        return tuple(dict.fromkeys(active.request for lane in lanes for active in lane))

    def check(self, in_flight: Counter[ActiveSequence]) -> None:
        """Nothing is lost and nothing is counted twice.

        in_flight: how many plans in flight have a row of a sequence.
        """
        holders = {**self._running_holdings(), **self._leaving}
        assert all(active.num_in_flight == in_flight[active] for active in holders)
        assert all(active.num_in_flight for active in self._leaving), "nobody gives it back"
        self.slots.check([holdings.slot for holdings in holders.values()])
        offloaded = [a.offloaded.host_block_ids for a in self.waiting if a.offloaded is not None]
        self.kv.check([holdings.block_ids for holdings in holders.values()], offloaded)
        if self.reservations is not None:
            self.reservations.check(list(self.running), list(self._leaving))
        self.waiting.check()
        self.adapters.check(Counter(h for active in holders for h in active.request.handles))
        requests = self._requests.values()
        self.shares.check(Counter(request.share for request in requests))
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

    def _take_slot(self, active: ActiveSequence, block_ids: list[BlockId]) -> None:
        sequence = active.sequence
        self._leave_queue(active)
        self.adapters.acquire(active.request.handles)
        sequence.slot = self.slots.allocate()
        assert sequence.slot is not None, "no free slot"
        sequence.block_ids = block_ids
        sequence.become(SequenceStatus.RUNNING)
        active.num_tokens_at_admission = sequence.num_tokens
        self.running.add(active)
        if self.reservations is not None:
            self.reservations.begin(active)

    def _leave_queue(self, active: ActiveSequence) -> None:
        held_back = active.request.held_back
        if active in held_back:
            held_back.remove(active)
        else:
            self.waiting.remove(active)

    def _charge(self, active: ActiveSequence, num_input: int, num_output: int) -> None:
        self.shares.charge(active.request.share, num_input, num_output)

    def _offload(self, active: ActiveSequence) -> tuple[BlockTransfer, ...]:
        """Nothing is worth it whose scores are still to be told: they need every position."""
        sequence = active.sequence
        request = active.request
        if not sequence.num_computed_tokens or request.wants_prompt_scores or request.beams:
            return ()
        offload = self.kv.offload(sequence.block_ids, sequence.num_computed_tokens)
        if offload is None:
            return ()
        active.offloaded = OffloadedKV(offload.host_block_ids, sequence.num_computed_tokens)
        return offload.transfers

    def _vacate(self, active: ActiveSequence) -> None:
        """Give back everything that a running sequence holds: now, or once it is not in flight."""
        sequence = active.sequence
        assert sequence.slot is not None
        self.running.remove(active)
        holdings = _Holdings(sequence.slot, sequence.block_ids)
        if active.num_in_flight:
            self._leaving[active] = holdings
        else:
            self._give_back(active, holdings)
        sequence.slot = None
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_hashed_blocks = 0

    def _give_back(self, active: ActiveSequence, holdings: _Holdings) -> None:
        if self.reservations is not None:
            self.reservations.end(active)
        self.slots.release(holdings.slot)
        self.kv.release(holdings.block_ids)
        self.adapters.release(active.request.handles)

    def _running_holdings(self) -> dict[ActiveSequence, _Holdings]:
        return {
            active: _Holdings(active.sequence.slot, active.sequence.block_ids)
            for active in self.running
            if active.sequence.slot is not None
        }

    def _end(self, active: ActiveSequence, reason: FinishReason) -> None:
        sequence, request = active.sequence, active.request
        if sequence.status is SequenceStatus.RUNNING:
            self._vacate(active)
        else:
            self._leave_queue(active)
            self.forget_offloaded(active)
        sequence.finish_reason = reason
        sequence.become(SequenceStatus.FINISHED)
        request.num_unfinished -= 1
        self._num_unfinished -= 1

    def _end_request(self, request: ActiveRequest, error: ErrorInfo | None) -> None:
        del self._requests[request.request_id]
        self.adapters.unwant(request.handles)
        self.shares.leave(request.share)
        if request.was_scheduled:
            service_ns = self.clock.now_ns() - request.group.first_scheduled_ns
            self.queue_bound.served(service_ns)
        else:
            self.queue_bound.leave()
        self.outbox.finished(request, error)
