"""Running and waiting requests, and the slots, KV blocks and adapters that they use.

This is the state that planning and absorbing share. Every change of a sequence's status happens
here, and everything taken with a slot is released in one place.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

from loraplex.core.adapter import AdapterHandle
from loraplex.core.clock import Clock
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import FinishReason
from loraplex.core.plan import BlockTransfer, Slot
from loraplex.core.request import RequestId
from loraplex.memory.block_tables import (
    AdmittedBlocks,
    BlockCounts,
    BlockTables,
    Loaded,
    NewBlocks,
)
from loraplex.memory.image_cells import ImageCell, ImageCells
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.adapters import CacheFiller
from loraplex.scheduling.fair_share import FairShares
from loraplex.scheduling.output_queue import OutputQueue
from loraplex.scheduling.queues import QueueBound, WaitingQueue
from loraplex.scheduling.request import OffloadedKV, Request, Sequence, SequenceStatus
from loraplex.scheduling.reservations import BlockReservations
from loraplex.scheduling.running import RunningSet, SlotPool


@dataclasses.dataclass(slots=True)
class Counts:
    """Counters since the start, with the names of EngineStats."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


class _Resources(NamedTuple):
    """Slot, blocks and cells of a sequence. It also uses each of its adapters once."""

    slot: Slot
    block_tables: BlockTables
    image_cells: list[ImageCell]


class SchedulerState:
    """Invariant: a sequence has a slot, blocks and adapters exactly while it is RUNNING or in a
    launched step.

    Resources that a launched plan names are not released before the step has ended: `_leave_slot`
    is the only place that releases them, then or later.
    """

    def __init__(
        self,
        kv: KVBlocks,
        adapters: CacheFiller,
        slots: SlotPool,
        queue_bound: QueueBound,
        clock: Clock,
        shares: FairShares,
        max_seqs_per_request: int,
        reservations: BlockReservations | None = None,
        *,
        num_image_cells: int = 0,
    ) -> None:
        """reservations: blocks that running sequences will take; None if none are reserved.

        max_seqs_per_request: slots that the sequences of one request take at most. Beams, which
        need theirs together, are not limited by it.
        """
        self.kv = kv
        self.images = ImageCells(num_image_cells)
        self.adapters = adapters
        self.slots = slots
        self.queue_bound = queue_bound
        self.clock = clock
        self.shares = shares
        self.reservations = reservations
        self._max_seqs_per_request = max_seqs_per_request
        self.waiting = WaitingQueue(shares.counter, shares.resident_lead)
        self.running = RunningSet()
        self.outputs = OutputQueue()
        self.counts = Counts()
        self._requests: dict[RequestId, Request] = {}
        self._num_unfinished = 0
        self._leaving: dict[Sequence, _Resources] = {}
        """Sequences that no longer run, while a launched step still has rows of them."""

    @property
    def is_empty(self) -> bool:
        return not self._requests

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, including those that wait for another one of their request."""
        return self._num_unfinished - len(self.running)

    def find(self, request_id: RequestId) -> Request | None:
        """Return an unfinished request; None if it ended or is unknown."""
        return self._requests.get(request_id)

    def accept(self, request: Request, *, hold_back: bool) -> None:
        """Take a new request. With hold_back, only its first sequence waits for a slot now."""
        assert request.request_id not in self._requests, f"request {request.request_id} came twice"
        self._requests[request.request_id] = request
        self._num_unfinished += request.num_unfinished
        self.queue_bound.num_queued += 1
        self.adapters.cache.want(request.handles)
        engine_request = request.engine_request
        request.share = self.shares.key(engine_request, request.handles)
        self.shares.enter(request.share, engine_request.share_weight, self.waiting.by_share)
        request.held_back = list(request.sequences)
        request.max_unheld = 1 if hold_back else self._max_seqs_per_request
        self._fill(request)

    def update_ready(self, now_ns: int) -> None:
        """Note which waiting sequences have their adapters on the device."""
        self.waiting.update_ready(
            self.adapters.cache.take_moved(), now_ns, self.adapters.is_on_device
        )

    def release_held_back(self, request: Request) -> None:
        """Let as many sequences of a request wait for slots as it may hold."""
        request.max_unheld = self._max_seqs_per_request
        self._fill(request)

    def admit(self, sequence: Sequence, admission: AdmittedBlocks) -> None:
        """Make a sequence RUNNING with these blocks. There must be a free slot."""
        self._take_slot(sequence, admission.block_tables)
        sequence.num_cached_tokens = admission.num_cached_tokens
        sequence.num_computed_tokens = admission.num_cached_tokens
        sequence.num_hashed_blocks = admission.num_cached_tokens // self.kv.block_size
        sequence.input_to_encode = admission.input_to_encode
        # A prompt counts once: not again after a preemption, nor for each beam.
        if sequence.num_preemptions == 0 and admission.block_tables:
            num_new = max(0, sequence.num_prompt_tokens - sequence.num_cached_tokens)
            num_new += admission.input_to_encode
            self.counts.prompt_tokens += sequence.num_prompt_tokens + admission.input_to_encode
            self.counts.cached_tokens += sequence.num_cached_tokens
            self.shares.charge(sequence.request.share, num_new, 0)

    def resume(self, sequence: Sequence, loaded: Loaded) -> None:
        """Make a sequence RUNNING with the KV that went to the host when it was preempted."""
        offloaded, sequence.offloaded = sequence.offloaded, None
        assert offloaded is not None, "its KV is not on the host"
        self._take_slot(sequence, loaded.block_tables)
        sequence.num_computed_tokens = offloaded.num_computed_tokens
        sequence.num_hashed_blocks = loaded.num_hashed_blocks

    def count_output(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge new tokens to the sequence's fair share."""
        self.shares.charge(sequence.request.share, 0, num_tokens)

    def grow(self, sequence: Sequence, num_tokens: int) -> NewBlocks | None:
        """Extend a running sequence's block tables to num_tokens tokens; return the new blocks.

        None and no change if there are too few blocks.
        """
        if self.kv.fits(sequence.block_tables, num_tokens):
            return self.kv.no_new
        new_block_ids = self.kv.grow(
            sequence.block_tables, num_tokens, *self._state_limits(sequence, num_tokens)
        )
        if new_block_ids is not None and any(new_block_ids):
            for table, block_ids in zip(sequence.block_tables, new_block_ids, strict=True):
                table.extend(block_ids)
            self.update_reservation(sequence)
        return new_block_ids

    def fit(self, sequence: Sequence, num_tokens: int) -> NewBlocks:
        """Return all blocks of a sequence whose first step since its admission is to num_tokens."""
        self.kv.fit(
            sequence.block_tables,
            sequence.num_computed_tokens,
            num_tokens,
            *self._state_limits(sequence, num_tokens),
        )
        return tuple(map(tuple, sequence.block_tables))

    def _state_limits(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """Return num_certain_tokens and num_to_leave of KVBlocks.grow.

        The newest token may be computed again, and draft tokens may be wrong. Every running
        sequence can take the two states that its step needs.
        """
        return min(num_tokens, sequence.num_tokens - 1), 2 * len(self.running)

    def update_reservation(self, sequence: Sequence) -> None:
        """Note that the block tables of a running sequence have changed."""
        if self.reservations is not None:
            self.reservations.update(sequence)

    def num_blocks_to_leave(self, sequence: Sequence, num_taken: BlockCounts) -> BlockCounts | None:
        """Return how many blocks must stay available if a sequence is admitted with num_taken.

        The sequences scheduled with it are included. None: it must wait, however many blocks are
        available.
        """
        if self.reservations is not None:
            return self.reservations.num_to_leave(sequence, num_taken)
        groups = self.kv.groups
        if not self.running:
            return (0,) * len(groups)
        # One block for each running row; otherwise this one would soon be preempted for it.
        num_spare = len(self.running) + sequence.request.num_spare_blocks
        # Running sequences take no more blocks of the encoder's positions.
        num_spare_of = [0 if group.is_of_encoder else num_spare for group in groups]
        if groups[0].frees_early or not self.kv.frees_early:
            return tuple(num_spare_of)
        # Where a group has a window, all take the blocks of a prompt chunk by chunk. At the
        # admission of a running sequence the others had the blocks of its whole prompt.
        owed = [self.kv.num_missing(one.block_tables, one.num_tokens) for one in self.running]
        return tuple(
            num_spare + (0 if group.frees_early else sum(counts))
            for group, num_spare, counts in zip(
                groups, num_spare_of, zip(*owed, strict=True), strict=True
            )
        )

    def preempt(self, sequence: Sequence, *, may_offload: bool = True) -> tuple[BlockTransfer, ...]:
        """Make a running sequence WAITING; return the transfers that keep its KV on the host.

        There are none if the KV may not go there or the host memory is full. Then the KV is
        computed again later, or found in the prefix cache.
        """
        assert not sequence.num_pending_steps, "preempted while in a launched step"
        transfers = self._offload(sequence) if may_offload else ()
        self.requeue(sequence)
        return transfers

    def requeue(self, sequence: Sequence) -> None:
        """Make a running sequence WAITING and drop what it has computed.

        Sequences that are scheduled together leave together, and the first one waits for all.
        """
        first, *others = sequence.request.scheduled_with(sequence)
        for one in (first, *others):
            self._leave_slot(one)
            one.is_left_out = False
            one.num_preemptions += 1
            one.set_status(SequenceStatus.WAITING)
            self.counts.preemptions += 1
        self.waiting.add(first)
        if others:
            sequence.request.held_back = others

    def hold_images(self, sequence: Sequence, num_computed_tokens: int) -> bool:
        """Hold the images that a sequence has yet to compute; False and no change if it fails."""
        request = sequence.request
        images = [image for image in request.images if image.end > num_computed_tokens]
        if not images:
            return True
        cells = self.images.acquire([request.image_key(image) for image in images])
        if cells is None:
            return False
        firsts = (image.first for image in images)
        sequence.image_cells = dict(zip(firsts, cells, strict=True))
        return True

    def release_images(self, sequence: Sequence, num_computed_tokens: int | None = None) -> None:
        """Release the images that a sequence has computed; None: all of them."""
        for image in sequence.request.images:
            if num_computed_tokens is None or image.end <= num_computed_tokens:
                cell = sequence.image_cells.pop(image.first, None)
                self.images.release([] if cell is None else [cell])

    def end_step(self, sequence: Sequence) -> None:
        """Note that a step with a row of the sequence has ended."""
        sequence.num_pending_steps -= 1
        if not sequence.num_pending_steps and sequence in self._leaving:
            self._release(sequence, self._leaving.pop(sequence))

    def drop_offloaded(self, sequence: Sequence) -> None:
        """Free the sequence's KV on the host: it is computed again."""
        if sequence.offloaded is not None:
            self.kv.free_host(sequence.offloaded.host_tables)
            sequence.offloaded = None

    def end_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence; its request ends with the last one."""
        request = sequence.request
        self._end(sequence, reason)
        if request.num_unfinished == 0:
            self._end_request(request, None)
        else:
            self._fill(request)

    def fail_request(self, request: Request, error: ErrorInfo) -> None:
        """End a request with an error."""
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._end(sequence, FinishReason.ERROR)
        self._end_request(request, error)

    def fail_waiting_for(self, handle: AdapterHandle) -> None:
        """End the requests that wait for a FAILED adapter; a later request may try again."""
        error = self.adapters.cache.refusal((handle,), self.clock.now_ns())
        if error is None:
            return
        for request in self.waiting_for(handle):
            self.fail_request(request, error.to_info())

    def waiting_for(self, handle: AdapterHandle) -> tuple[Request, ...]:
        """Return the requests with waiting sequences that need an adapter."""
        queues = self.waiting.by_handle.get(handle, ())
        return tuple(dict.fromkeys(sequence.request for queue in queues for sequence in queue))

    def check(self, num_pending: Counter[Sequence]) -> None:
        """Assert that nothing is lost and nothing is counted twice.

        num_pending: how many launched steps have a row of each sequence.
        """
        users = {**self._running_resources(), **self._leaving}
        assert all(sequence.num_pending_steps == num_pending[sequence] for sequence in users)
        assert all(s.num_pending_steps for s in self._leaving), "never released"
        self.slots.check([resources.slot for resources in users.values()])
        offloaded = [s.offloaded.host_tables for s in self.waiting if s.offloaded is not None]
        self.kv.check([resources.block_tables for resources in users.values()], offloaded)
        self.images.check([resources.image_cells for resources in users.values()])
        if self.reservations is not None:
            self.reservations.check(list(self.running), list(self._leaving))
        self.waiting.check()
        self.update_ready(self.clock.now_ns())
        for queue in self.waiting.queues:
            assert queue.is_ready == all(map(self.adapters.is_on_device, queue.handles)), "ready"
        self.adapters.check(Counter(h for sequence in users for h in sequence.request.handles))
        requests = self._requests.values()
        self.shares.check(Counter(request.share for request in requests))
        self.queue_bound.check(sum(not request.was_scheduled for request in requests))
        held_back = [sequence for request in requests for sequence in request.held_back]
        placed = [*self.running, *self.waiting, *held_back]
        assert all(
            r.num_unfinished - len(r.held_back) <= max(r.max_unheld, r.num_slots) for r in requests
        ), "too many"
        alive = [s for request in requests for s in request.sequences if not s.is_finished]
        assert len(placed) == len(alive) == self._num_unfinished
        assert set(placed) == set(alive), "a sequence is in no queue, or in two"
        assert all(request.num_unfinished > 0 for request in requests), "an ended request"
        runs = set(self.running)
        for sequence in alive:
            sequence.check(runs=sequence in runs)

    def _fill(self, request: Request) -> None:
        """Let the next sequences that are held back take the place of those that ended."""
        if not request.held_back:
            return
        num_unheld = request.num_unfinished - len(request.held_back)
        num_next = max(0, request.max_unheld - num_unheld)
        for sequence in request.held_back[:num_next]:
            self.waiting.add(sequence)
        del request.held_back[:num_next]

    def _take_slot(self, sequence: Sequence, block_tables: BlockTables) -> None:
        self._leave_queue(sequence)
        self.adapters.acquire(sequence.request.handles)
        sequence.slot = self.slots.allocate()
        assert sequence.slot is not None, "no free slot"
        sequence.block_tables = block_tables
        sequence.set_status(SequenceStatus.RUNNING)
        sequence.num_tokens_at_admission = sequence.num_tokens
        self.running.add(sequence)
        self.update_reservation(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        held_back = sequence.request.held_back
        if sequence in held_back:
            held_back.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _offload(self, sequence: Sequence) -> tuple[BlockTransfer, ...]:
        if not sequence.num_computed_tokens or not sequence.request.can_offload:
            return ()
        offload = self.kv.offload(sequence.block_tables, sequence.num_computed_tokens)
        if offload is None:
            return ()
        sequence.offloaded = OffloadedKV(offload.host_tables, sequence.num_computed_tokens)
        return offload.transfers

    def _leave_slot(self, sequence: Sequence) -> None:
        """Release what a running sequence uses: now, or after the launched steps that name it."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        resources = _resources_of(sequence)
        sequence.image_cells = {}
        if sequence.num_pending_steps:
            self._leaving[sequence] = resources
        else:
            self._release(sequence, resources)
        sequence.slot = None
        sequence.forget_blocks()

    def _release(self, sequence: Sequence, resources: _Resources) -> None:
        if self.reservations is not None:
            self.reservations.end(sequence)
        self.slots.release(resources.slot)
        self.kv.release(resources.block_tables)
        self.images.release(resources.image_cells)
        self.adapters.release(sequence.request.handles)

    def _running_resources(self) -> dict[Sequence, _Resources]:
        return {sequence: _resources_of(sequence) for sequence in self.running}

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_slot(sequence)
        else:
            self._leave_queue(sequence)
            self.drop_offloaded(sequence)
        sequence.finish_reason = reason
        sequence.set_status(SequenceStatus.FINISHED)
        sequence.request.num_unfinished -= 1
        self._num_unfinished -= 1

    def _end_request(self, request: Request, error: ErrorInfo | None) -> None:
        del self._requests[request.request_id]
        self.adapters.cache.unwant(request.handles)
        self.shares.leave(request.share)
        if request.was_scheduled:
            self.queue_bound.served(self.clock.now_ns() - request.first_scheduled_ns)
        else:
            self.queue_bound.num_queued -= 1
        self.outputs.finish(request, error)


def _resources_of(sequence: Sequence) -> _Resources:
    assert sequence.slot is not None, "it does not run"
    cells = list(sequence.image_cells.values())
    return _Resources(sequence.slot, sequence.block_tables, cells)
