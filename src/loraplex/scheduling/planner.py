"""Who computes what in the next step: first those who run, then those who wait."""

from loraplex.core.plan import BlockId
from loraplex.core.sequence import SequenceStatus
from loraplex.memory.kv_blocks import Admission
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.adapters import Readiness
from loraplex.scheduling.budget import StepBudget
from loraplex.scheduling.draft import PlanDraft
from loraplex.scheduling.queues import Lane
from loraplex.scheduling.roster import Roster
from loraplex.scheduling.settings import SchedulerSettings

NUM_PREFETCHED_LANES = 32
"""Sets of adapters that are brought closer while nobody can be seated."""


class Planner:
    """Drafts one plan after another.

    A sequence takes the blocks of all its tokens when it takes its slot, and one more block
    whenever its tokens outgrow them. If there is none, the last running sequence in policy order
    is preempted.
    """

    def __init__(self, roster: Roster, settings: SchedulerSettings, max_num_seqs: int) -> None:
        self._roster = roster
        self._settings = settings
        self._max_num_seqs = max_num_seqs
        self._shortage: tuple[int, int] | None = None
        """(sequence id, available blocks) when a sequence last found too few of them."""

    def draft(self, now_ns: int) -> PlanDraft:
        settings = self._settings
        draft = PlanDraft(StepBudget(settings.max_num_batched_tokens, settings.max_prefill_chunk))
        self._plan_running(draft)
        self._plan_waiting(draft, now_ns)
        return draft

    def held_until_ns(self) -> int:
        """While nothing runs, until when requests wait for company; 0: no longer."""
        roster, delay_ns = self._roster, self._settings.max_queue_delay_ns
        if not delay_ns or roster.running or not roster.waiting:
            return 0
        if roster.num_waiting >= self._max_num_seqs:
            return 0
        return min(active.request.arrival_ns for active in roster.waiting) + delay_ns

    def _plan_running(self, draft: PlanDraft) -> None:
        """Rows that need one token first: they hold nobody up, and only they can want a block."""
        running = self._roster.running
        decoding = [a for a in running if a.sequence.num_uncomputed_tokens == 1]
        prefilling = [a for a in running if a.sequence.num_uncomputed_tokens > 1]
        for active in (*decoding, *prefilling):
            if active.sequence.status is not SequenceStatus.RUNNING:
                continue
            num_tokens = draft.budget.offer(active.sequence.num_uncomputed_tokens)
            if num_tokens == 0:
                return
            new_block_ids = self._grow(active, num_tokens, draft)
            if new_block_ids is not None:
                draft.compute(active, num_tokens, new_block_ids)

    def _grow(
        self, active: ActiveSequence, num_tokens: int, draft: PlanDraft
    ) -> list[BlockId] | None:
        """New blocks for the next tokens; None if the sequence itself had to be preempted.

        Rows that want a block are planned in policy order, and preemption takes the last: it never
        takes one that is planned already.
        """
        roster, sequence = self._roster, active.sequence
        num_computed = sequence.num_computed_tokens + num_tokens
        if num_computed <= len(sequence.block_ids) * roster.kv.block_size:
            return []
        while (new_block_ids := roster.kv.grow(sequence.block_ids, num_computed)) is None:
            victim = roster.running.last
            assert len(roster.running) > 1, "a sequence that cannot fit alone was accepted"
            roster.preempt(victim)
            draft.num_preempted += 1
            if victim is active:
                return None
        sequence.block_ids.extend(new_block_ids)
        return new_block_ids

    def _plan_waiting(self, draft: PlanDraft, now_ns: int) -> None:
        """Seat whom we can; bring the adapters of the others closer."""
        waiting = self._roster.waiting
        scan = self._roster.adapters.scan(now_ns)
        may_seat = not draft.num_preempted and self.held_until_ns() <= now_ns
        index = 0
        while index < waiting.num_lanes:
            if index >= NUM_PREFETCHED_LANES and not may_seat:
                break
            lane = waiting.lane_at(index)
            ready = scan.visit(lane.head.request) is Readiness.READY
            lane.ready_since_ns = (lane.ready_since_ns or now_ns) if ready else 0
            if ready and may_seat and self._seat(lane, draft, now_ns):
                continue
            # Short of slots, tokens or blocks: who is behind must not take them first.
            may_seat = may_seat and not ready
            scan.pass_over()
            index += 1
        scan.preload()

    def _seat(self, lane: Lane, draft: PlanDraft, now_ns: int) -> bool:
        """Give the first sequence of a ready lane a slot, blocks and its first tokens."""
        active = lane.head
        if not self._roster.slots.num_free or not draft.budget.num_left:
            return False
        admission = self._take_blocks(active)
        if admission is None:
            return False
        self._roster.seat(active, admission)
        self._note_first_admission(active, lane.ready_since_ns, now_ns)
        draft.join(active)
        num_tokens = draft.budget.offer(active.sequence.num_uncomputed_tokens)
        draft.compute(active, num_tokens, admission.block_ids)
        return True

    def _take_blocks(self, active: ActiveSequence) -> Admission | None:
        """Blocks for all tokens of a sequence, the known beginning from the prefix cache."""
        roster, sequence, request = self._roster, active.sequence, active.request
        # One block for each running row, or this one would soon be preempted for it.
        num_reserved = len(roster.running)
        num_available = roster.kv.num_available - num_reserved
        if num_reserved and self._is_short(sequence.sequence_id, num_available):
            return None
        active.scores_prompt = request.wants_prompt_scores
        admission = roster.kv.admit(
            sequence.token_ids,
            request.group.request.kv_salt,
            max_new_tokens=sequence.num_tokens,
            max_cached_tokens=0 if active.scores_prompt else None,
            num_reserved_blocks=num_reserved,
        )
        self._shortage = None if admission else (sequence.sequence_id, num_available)
        return admission

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
