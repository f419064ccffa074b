"""Who computes what in the next step: first those who run, then those who wait."""

import enum

from loraplex.core.adapter import AdapterHandle
from loraplex.core.plan import BlockId
from loraplex.core.sequence import SequenceStatus
from loraplex.scheduling.active import ActiveSequence, OffloadedKV
from loraplex.scheduling.adapters import AdapterReadiness, AdapterScan
from loraplex.scheduling.beam_rows import plan_group, seat_group
from loraplex.scheduling.budget import StepBudget
from loraplex.scheduling.draft import PlanDraft
from loraplex.scheduling.prefill import PrefillSplit
from loraplex.scheduling.queues import Lane
from loraplex.scheduling.roster import Roster
from loraplex.scheduling.settings import Batching, SchedulerSettings
from loraplex.scheduling.speculation import add_drafts
from loraplex.scheduling.static_batch import StaticBatch

NUM_PREFETCHED_LANES = 32
"""Sets of adapters that are brought closer while nobody can be seated."""
NUM_SHORT_LOOKED_AT = 64
"""Of a lane, among so many the shortest is sought while there are no tokens for its head."""


class _Seating(enum.Enum):
    DONE = enum.auto()
    LACKS_TOKENS = enum.auto()
    """A shorter one could be seated."""
    LACKS_ROOM = enum.auto()
    """Short of slots or blocks: who is behind must not take them first."""


class Planner:
    """Drafts one plan after another.

    A sequence takes the blocks of all its tokens when it takes its slot, and one more block
    whenever its tokens outgrow them; with an attention window, those of its next chunk. If there
    is none, the last running sequence in policy order is preempted.
    """

    def __init__(self, roster: Roster, settings: SchedulerSettings, max_num_seqs: int) -> None:
        self._roster = roster
        self._settings = settings
        self._max_num_seqs = max_num_seqs
        self._batch = StaticBatch() if settings.batching is Batching.STATIC else None
        self._shortage: tuple[int, int] | None = None
        """(sequence id, available blocks) when a sequence last found too few of them."""

    @property
    def num_seats(self) -> int:
        """Of the sequences that wait, how many the free slots can take as things are."""
        roster, limit = self._roster, self._settings.max_seqs_per_adapter
        if self._batch is not None and self._batch.is_running:
            return 0
        num_free = roster.slots.num_free
        if not limit or not num_free:
            return num_free
        num_running = roster.adapters.num_running
        num_seats = 0
        for lane in roster.waiting.lanes:
            num_more = min((limit - num_running(h) for h in lane.handles), default=num_free)
            num_seats += max(0, min(len(lane), num_more))
            if num_seats >= num_free:
                return num_free
        return num_seats

    def draft(self, now_ns: int, *, is_ahead: bool = False) -> PlanDraft:
        """is_ahead: the sequences are what they will be once a plan in flight has landed."""
        settings = self._settings
        budget = StepBudget(settings.max_num_batched_tokens, settings.max_prefill_chunk)
        draft = PlanDraft(budget, is_ahead=is_ahead)
        self._roster.kv.advance(now_ns)
        self._plan_decodes(draft)
        split = PrefillSplit(
            draft.budget,
            settings.shortest_prefill_share,
            seats_all=settings.batching is Batching.STATIC,
        )
        for active in self._roster.running:
            if active not in draft.named and active.num_computable_tokens:
                split.add(active, is_new=False)
        if self._batch is None:
            may_seat = not draft.lacks_blocks and self.held_until_ns() <= now_ns
            self._plan_waiting(draft, split, now_ns, may_seat=may_seat)
        else:
            self._plan_batch(self._batch, draft, split, now_ns)
        self._plan_prefills(draft, split)
        add_drafts(self._roster, draft)
        return draft

    def held_until_ns(self) -> int:
        """While nothing runs, until when requests wait for company; 0: no longer."""
        roster, delay_ns = self._roster, self._settings.max_queue_delay_ns
        if not delay_ns or roster.running or not roster.waiting:
            return 0
        if roster.num_waiting >= self._max_num_seqs:
            return 0
        if self._batch is not None and self._batch.is_running:
            return 0
        return min(active.request.arrival_ns for active in roster.waiting) + delay_ns

    def _plan_decodes(self, draft: PlanDraft) -> None:
        """Rows that need one token first: they hold nobody up."""
        for active in [a for a in self._roster.running if a.decodes]:
            if active.sequence.status is not SequenceStatus.RUNNING:
                continue
            if active.request.beams is None:
                self._compute(active, 1, draft)
            else:
                plan_group(self._roster, draft, active.request)

    def _plan_prefills(self, draft: PlanDraft, split: PrefillSplit) -> None:
        for active, num_tokens in split.grants():
            if active.sequence.status is SequenceStatus.RUNNING:
                self._compute(active, num_tokens, draft)

    def _compute(self, active: ActiveSequence, num_tokens: int, draft: PlanDraft) -> None:
        new_block_ids = draft.named.get(active)
        if new_block_ids is None:
            new_block_ids = self._grow(active, num_tokens, draft)
        if new_block_ids is not None:
            draft.compute(active, num_tokens, new_block_ids)

    def _grow(
        self, active: ActiveSequence, num_tokens: int, draft: PlanDraft
    ) -> list[BlockId] | None:
        """New blocks for the next tokens; None if there are none for it in this step.

        Rows that want a block are planned in policy order, and preemption takes the last. What is
        planned already is not taken: only a chunk of a prompt may want a block after it, which
        then waits for the next step.
        """
        roster, sequence = self._roster, active.sequence
        num_computed = sequence.num_computed_tokens + num_tokens
        while (new_block_ids := roster.grow(active, num_computed)) is None:
            if draft.is_ahead:
                # With a window, the step in flight has blocks that it then gives back.
                draft.is_short = True
                return None
            assert roster.reservations is None, "a reserved block is gone"
            victim = roster.running.last
            if draft.names(victim):
                return None
            assert len(roster.running) > 1, "a sequence that cannot fit alone was accepted"
            draft.preempt(roster, victim)
            if victim is active:
                return None
        return new_block_ids

    def _plan_batch(
        self, batch: StaticBatch, draft: PlanDraft, split: PrefillSplit, now_ns: int
    ) -> None:
        """Static batching: form a batch, or let those of the present one come back."""
        if batch.is_running:
            self._plan_members(batch, draft, split, now_ns)
            return
        may_seat = not draft.lacks_blocks and self.held_until_ns() <= now_ns
        if may_seat and self._roster.waiting:
            may_seat = not self._bring_adapters(batch.due_since(now_ns), now_ns)
        self._plan_waiting(draft, split, now_ns, may_seat=may_seat)
        batch.form(active.request for active in draft.joined)

    def _bring_adapters(self, since_ns: int, now_ns: int) -> bool:
        """Is an adapter on its way that a member of the next batch waits for?

        Whose adapters lack room waits for a later batch: nothing runs, so the first one's do not.
        """
        scan = self._roster.adapters.scan(now_ns)
        lanes = self._roster.waiting.scan()
        is_coming = False
        for _ in range(self._max_num_seqs):
            lane = lanes.next()
            if lane is None:
                break
            readiness = scan.visit(lane.head.request)
            came_in_time = lane.head.request.arrival_ns <= since_ns
            is_coming = is_coming or (readiness is AdapterReadiness.COMING and came_in_time)
            scan.pass_over()
        return is_coming

    def _plan_members(
        self, batch: StaticBatch, draft: PlanDraft, split: PrefillSplit, now_ns: int
    ) -> None:
        """Those of the batch that wait; for others, adapters only."""
        scan = self._roster.adapters.scan(now_ns)
        may_seat = not draft.lacks_blocks
        for active in batch.waiting():
            if self._at_limit(active):
                continue
            is_ready = scan.visit(active.request) is AdapterReadiness.READY
            if is_ready and may_seat:
                seating = self._seat(active, draft, split, 0, now_ns)
                may_seat = seating is not _Seating.LACKS_ROOM
                if seating is _Seating.DONE:
                    continue
            scan.pass_over()
        self._plan_waiting(draft, split, now_ns, may_seat=False, scan=scan)

    def _plan_waiting(
        self,
        draft: PlanDraft,
        split: PrefillSplit,
        now_ns: int,
        *,
        may_seat: bool,
        scan: AdapterScan | None = None,
    ) -> None:
        """Seat whom we can; bring the adapters of the others closer."""
        scan = scan or self._roster.adapters.scan(now_ns)
        lanes = self._roster.waiting.scan()
        num_passed, lacks_tokens = 0, False
        awaited: set[AdapterHandle] = set()
        while (lane := lanes.next()) is not None:
            if num_passed >= NUM_PREFETCHED_LANES and (lacks_tokens or not may_seat):
                break
            num_passed += 1
            if at_limit := self._at_limit(lane.head):
                # Beams wait for several places at once: who is behind must not take the first.
                awaited.update(at_limit)
                continue
            if awaited and not awaited.isdisjoint(lane.handles):
                continue
            is_ready = scan.visit(lane.head.request) is AdapterReadiness.READY
            self._roster.waiting.note_ready(lane, now_ns if is_ready else None)
            if is_ready and may_seat:
                seating = self._seat_one_of(lane, draft, split, now_ns)
                if seating is _Seating.DONE:
                    lanes.again(lane)
                    num_passed -= 1
                    continue
                may_seat = seating is _Seating.LACKS_TOKENS
                lacks_tokens = lacks_tokens or may_seat
            scan.pass_over()
        scan.preload()

    def _at_limit(self, active: ActiveSequence) -> list[AdapterHandle]:
        """Its adapters of which more sequences would run than may, if it took a slot."""
        limit, request = self._settings.max_seqs_per_adapter, active.request
        if not limit:
            return []
        num_more = 1 if request.beams is None else request.beams.width
        num_running = self._roster.adapters.num_running
        return [h for h in request.handles if num_running(h) + num_more > limit]

    def _seat_one_of(
        self, lane: Lane, draft: PlanDraft, split: PrefillSplit, now_ns: int
    ) -> _Seating:
        """The first sequence of a ready lane, or a short one if the first would get no token."""
        seating = self._seat(lane.head, draft, split, lane.ready_since_ns, now_ns)
        if seating is _Seating.LACKS_TOKENS:
            shortest = lane.shortest(NUM_SHORT_LOOKED_AT)
            seating = self._seat(shortest, draft, split, lane.ready_since_ns, now_ns)
        return seating

    def _seat(
        self,
        active: ActiveSequence,
        draft: PlanDraft,
        split: PrefillSplit,
        ready_since_ns: int,
        now_ns: int,
    ) -> _Seating:
        """Give a sequence whose adapters are ready a slot and blocks; its tokens come later."""
        if not self._roster.slots.num_free:
            return _Seating.LACKS_ROOM
        if not split.has_room_for(active):
            return _Seating.LACKS_TOKENS
        if active.request.beams is not None:
            if not seat_group(self._roster, draft, active.request):
                return _Seating.LACKS_ROOM
            self._note_first_admission(active, ready_since_ns, now_ns)
            if active.num_computable_tokens:
                split.add(active, is_new=True)
            return _Seating.DONE
        if not self._take_room(active, draft):
            return _Seating.LACKS_ROOM
        self._note_first_admission(active, ready_since_ns, now_ns)
        draft.join(active)
        split.add(active, is_new=True)
        return _Seating.DONE

    def _take_room(self, active: ActiveSequence, draft: PlanDraft) -> bool:
        """A slot, and blocks for all tokens of a sequence (with a window, for its first chunk)."""
        roster, sequence = self._roster, active.sequence
        num_blocks = roster.kv.num_blocks_for(sequence.num_tokens)
        num_reserved = roster.num_blocks_to_leave(active, num_blocks)
        if num_reserved is None:
            return False
        num_available = roster.kv.num_available - num_reserved
        if num_reserved and self._is_short(sequence.sequence_id, num_available):
            return False
        active.scores_prompt = active.request.wants_prompt_scores
        if active.offloaded is None:
            has_room = self._admit(active, num_reserved)
        else:
            has_room = self._load_back(active, active.offloaded, num_reserved, draft)
        self._shortage = None if has_room else (sequence.sequence_id, num_available)
        if has_room:
            draft.named[active] = list(sequence.block_ids)
        return has_room

    def _load_back(
        self, active: ActiveSequence, offloaded: OffloadedKV, num_reserved: int, draft: PlanDraft
    ) -> bool:
        loaded = self._roster.kv.load_back(
            active.sequence.token_ids,
            active.request.group.request.kv_salt,
            offloaded.host_block_ids,
            offloaded.num_computed_tokens,
            self._num_tokens_to_fit(active, offloaded.num_computed_tokens),
            num_reserved_blocks=num_reserved,
        )
        if loaded is None:
            return False
        self._roster.seat_again(active, loaded)
        draft.block_loads.extend(loaded.transfers)
        return True

    def _admit(self, active: ActiveSequence, num_reserved: int) -> bool:
        sequence, request = active.sequence, active.request.group.request
        admission = self._roster.kv.admit(
            sequence.token_ids,
            request.kv_salt,
            max_new_tokens=self._num_tokens_to_fit(active, 0),
            max_cached_tokens=0 if active.scores_prompt else None,
            num_reserved_blocks=num_reserved,
            retention=request.retention,
            num_prompt_tokens=sequence.num_prompt_tokens,
        )
        if admission is None:
            return False
        self._roster.seat(active, admission)
        return True

    def _num_tokens_to_fit(self, active: ActiveSequence, num_computed_tokens: int) -> int:
        num_tokens = active.sequence.num_tokens
        if not self._roster.kv.has_window:
            return num_tokens
        return min(num_tokens, num_computed_tokens + self._settings.max_step_tokens)

    def _is_short(self, sequence_id: int, num_available: int) -> bool:
        """Did it find too few blocks before, and there are no more now? Spares hashing a prompt."""
        if self._shortage is None or self._shortage[0] != sequence_id:
            return False
        return num_available <= self._shortage[1]

    def _note_first_admission(self, active: ActiveSequence, ready_ns: int, now_ns: int) -> None:
        request = active.request
        if request.was_scheduled:
            return
        request.was_scheduled = True
        request.num_cached_tokens = active.sequence.num_cached_tokens
        request.group.first_scheduled_ns = now_ns
        if request.handles:
            request.group.adapter_ready_ns = max(ready_ns, request.arrival_ns)
        self._roster.queue_bound.leave()
