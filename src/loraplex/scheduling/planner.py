"""What each sequence computes in the next step: first running sequences, then waiting ones."""

from loraplex.core.adapter import AdapterHandle
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.memory.block_tables import NewBlocks
from loraplex.scheduling.adapters import AdapterReadiness, AdapterScan
from loraplex.scheduling.admitter import AdmitResult, Admitter
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.beam_scheduling import BeamScheduling
from loraplex.scheduling.fair_share import SharedSteps
from loraplex.scheduling.plan_builder import PlanBuilder, StepBudget
from loraplex.scheduling.pool_request import PoolRequest
from loraplex.scheduling.prefill import PrefillSplit, SpanClaim
from loraplex.scheduling.queues import AdapterQueue
from loraplex.scheduling.request import Request, Sequence, SequenceStatus
from loraplex.scheduling.slot_claims import SlotClaims
from loraplex.scheduling.speculation import add_draft_tokens
from loraplex.scheduling.state import SchedulerState

MAX_PREFETCHED_QUEUES = 32
"""Sets of adapters that one plan tries to bring closer. It looks at no more queues, except those
that it admits sequences of, and those whose adapters are on the device while slots are free."""
MAX_LATER_QUEUES = 16
"""Later sets of adapters that one plan tries to bring closer, in turns."""
MAX_SHORT_CANDIDATES = 64
"""Sequences of a queue among which the shortest is sought if its head would get no token."""


class InflightBatching:
    """Decides which waiting sequences join the next step."""

    admits_all = False
    """Whether a waiting sequence may take a slot even if it gets only one token in the step."""

    def __init__(
        self,
        state: SchedulerState,
        admitter: Admitter,
        settings: SchedulerSettings,
        max_num_seqs: int,
        shared: SharedSteps,
    ) -> None:
        self._state = state
        self._admitter = admitter
        self._claims = SlotClaims(state, settings, max_num_seqs)
        self._shared = shared
        self._next_later = MAX_PREFETCHED_QUEUES
        """Place of the later queue whose turn is next."""
        self._max_num_seqs = max_num_seqs
        self._max_seqs_per_adapter = settings.max_seqs_per_adapter
        self._max_queue_delay_ns = 1000 * settings.max_queue_delay_microseconds

    def num_admissible(self) -> int:
        """Return how many waiting sequences the free slots can take at present."""
        state, limit = self._state, self._max_seqs_per_adapter
        num_free = state.slots.num_free
        if not limit or not num_free:
            return num_free
        num_running = state.adapters.num_running
        num_admissible = 0
        for queue in state.waiting.queues:
            num_more = min((limit - num_running(h) for h in queue.handles), default=num_free)
            num_admissible += max(0, min(len(queue), num_more))
            if num_admissible >= num_free:
                return num_free
        return num_admissible

    def held_until_ns(self) -> int:
        """Return until when requests wait for others to join them while nothing runs; 0: now."""
        state, delay_ns = self._state, self._max_queue_delay_ns
        if not delay_ns or state.running or not state.waiting:
            return 0
        if state.num_waiting >= self._max_num_seqs:
            return 0
        return min(sequence.request.arrival_ns for sequence in state.waiting) + delay_ns

    def free_slots(self, builder: PlanBuilder) -> None:
        """Preempt sequences for shares that wait too long for their part of the slots."""
        self._claims.free_slots(builder)

    def admit(self, builder: PlanBuilder, split: PrefillSplit, now_ns: int) -> None:
        """Admit what can be admitted, and bring the adapters of the other sequences closer."""
        may_admit = self._may_admit(builder, now_ns)
        self._admit_waiting(builder, split, now_ns, may_admit=may_admit)

    def rest(self, now_ns: int) -> None:
        """Do what a plan does while there is no request: only preloads continue."""
        self._claims.end_plan()
        self._next_later = MAX_PREFETCHED_QUEUES
        self._state.adapters.cache.take_moved()
        self._state.adapters.advance_preloads(now_ns)

    def _may_admit(self, builder: PlanBuilder, now_ns: int) -> bool:
        return not builder.lacks_blocks and self.held_until_ns() <= now_ns

    def _admit_waiting(
        self,
        builder: PlanBuilder,
        split: PrefillSplit,
        now_ns: int,
        *,
        may_admit: bool,
        scan: AdapterScan | None = None,
    ) -> None:
        waiting, admitter, claims = self._state.waiting, self._admitter, self._claims
        scan = scan or self._state.adapters.scan(now_ns)
        queues = waiting.scan()
        num_kept = self._shared.num_slots_kept(now_ns)
        num_passed, num_unready, lacks_tokens, is_open = 0, 0, False, may_admit
        awaited: set[AdapterHandle] = set()
        while True:
            # With full pages thousands of queues may be waiting for others to end.
            queue = queues.next(ready_only=num_unready >= MAX_PREFETCHED_QUEUES)
            if queue is None:
                break
            if num_passed >= MAX_PREFETCHED_QUEUES and (lacks_tokens or not may_admit):
                break
            num_passed += 1
            num_unready += not queue.is_ready
            if at_limit := admitter.adapters_at_limit(queue.head):
                # Beams wait for several places at once: later queues must not take the first one.
                awaited.update(at_limit)
                continue
            if awaited and not awaited.isdisjoint(queue.handles):
                continue
            is_ready = scan.visit(queue.head.request) is AdapterReadiness.READY
            waiting.set_lead(queue, has_lead=is_ready)
            if is_ready and may_admit and claims.may_admit(queue, num_kept):
                result = self._admit_one(queue, builder, split, now_ns)
                if result is AdmitResult.ADMITTED:
                    claims.admitted(queue.share)
                    queues.revisit(queue)
                    num_passed -= 1
                    continue
                # Without slots or blocks, later sequences must not take what comes free first.
                may_admit = result is AdmitResult.LACKS_TOKENS
                lacks_tokens = lacks_tokens or may_admit
            if is_ready and is_open and not may_admit:
                claims.claim(queue)
            scan.pass_over()
        if is_open:
            claims.end_plan()
        self._prefetch_later(scan)
        scan.preload()

    def _prefetch_later(self, scan: AdapterScan) -> None:
        """Bring adapters closer that fit although those of the first queues do not."""
        later = self._state.waiting.unready(self._next_later, MAX_LATER_QUEUES)
        self._next_later = self._next_later + len(later) if later else MAX_PREFETCHED_QUEUES
        for queue in later:
            if not self._admitter.adapters_at_limit(queue.head):
                scan.prefetch(queue.head.request)

    def _admit_one(
        self, queue: AdapterQueue, builder: PlanBuilder, split: PrefillSplit, now_ns: int
    ) -> AdmitResult:
        """Admit the head of a queue, or the shortest of its first if the step has few tokens."""
        since_ns = queue.ready_since_ns
        result = self._admitter.admit(queue.head, builder, split, now_ns, since_ns)
        if result is AdmitResult.LACKS_TOKENS:
            shortest = queue.shortest(MAX_SHORT_CANDIDATES)
            result = self._admitter.admit(shortest, builder, split, now_ns, since_ns)
        return result


class StaticBatching(InflightBatching):
    """Forms a batch in one plan, as soon as the adapters that its requests need are there.

    Then only its own sequences take slots, until its last request has ended: those that were
    preempted, and those that waited for the prompt of their request.
    """

    admits_all = True
    _batch: tuple[Request, ...] = ()
    _due_since_ns: int | None = None
    """When the next batch could first have been formed."""

    def num_admissible(self) -> int:
        return 0 if self._is_running else super().num_admissible()

    def held_until_ns(self) -> int:
        return 0 if self._is_running else super().held_until_ns()

    def admit(self, builder: PlanBuilder, split: PrefillSplit, now_ns: int) -> None:
        """Form a batch, or readmit sequences of the present one."""
        if self._is_running:
            self._readmit(builder, split, now_ns)
            return
        may_admit = self._may_admit(builder, now_ns)
        if may_admit and self._state.waiting:
            may_admit = not self._awaits_adapters(now_ns)
        self._admit_waiting(builder, split, now_ns, may_admit=may_admit)
        self._batch = tuple(dict.fromkeys(sequence.request for sequence in builder.joined))
        if self._batch:
            self._due_since_ns = None

    @property
    def _is_running(self) -> bool:
        return any(request.num_unfinished for request in self._batch)

    def _awaits_adapters(self, now_ns: int) -> bool:
        """Return whether an adapter that the next batch needs is still being loaded or copied.

        Requests that came after the batch could be formed are not waited for. A request whose
        adapters do not fit waits for a later batch: nothing runs, so those of the first one fit.
        """
        if self._due_since_ns is None:
            self._due_since_ns = now_ns
        scan = self._state.adapters.scan(now_ns)
        queues = self._state.waiting.scan()
        is_coming = False
        for _ in range(self._max_num_seqs):
            queue = queues.next()
            if queue is None:
                break
            readiness = scan.visit(queue.head.request)
            came_in_time = queue.head.request.arrival_ns <= self._due_since_ns
            is_coming = is_coming or (readiness is AdapterReadiness.COMING and came_in_time)
            scan.pass_over()
        return is_coming

    def _readmit(self, builder: PlanBuilder, split: PrefillSplit, now_ns: int) -> None:
        """Admit waiting sequences of the batch; only bring the adapters of others closer."""
        scan = self._state.adapters.scan(now_ns)
        may_admit = not builder.lacks_blocks
        for sequence in self._waiting_members():
            if self._admitter.adapters_at_limit(sequence):
                continue
            is_ready = scan.visit(sequence.request) is AdapterReadiness.READY
            if is_ready and may_admit:
                result = self._admitter.admit(sequence, builder, split, now_ns)
                may_admit = result is not AdmitResult.LACKS_CAPACITY
                if result is AdmitResult.ADMITTED:
                    continue
            scan.pass_over()
        self._admit_waiting(builder, split, now_ns, may_admit=False, scan=scan)

    def _waiting_members(self) -> list[Sequence]:
        """Return the sequences of the batch that need a slot, in scheduling order."""
        return sorted(
            (
                sequence
                for request in self._batch
                for sequence in request.sequences
                if sequence.status is SequenceStatus.WAITING and sequence not in request.held_back
            ),
            key=lambda sequence: sequence.key,
        )


class Planner:
    """Builds one plan after another.

    A running sequence takes one more block whenever its tokens outgrow its blocks. If there is
    none, the last running sequence in scheduling order is preempted.
    """

    def __init__(
        self,
        state: SchedulerState,
        batching: InflightBatching,
        beams: BeamScheduling,
        settings: SchedulerSettings,
        num_balanced_tokens: int,
        shared: SharedSteps,
    ) -> None:
        """num_balanced_tokens: see Capacity."""
        self._state = state
        self._batching = batching
        self._beams = beams
        self._settings = settings
        self._num_balanced_tokens = num_balanced_tokens
        self._shared = shared
        self._claim: SpanClaim | None = None
        """What the last plan had too few tokens for."""

    def plan(self, now_ns: int, *, is_ahead: bool) -> PlanBuilder:
        """Return the next plan under construction.

        is_ahead: others are in flight, and the sequences are in the state after them.
        """
        settings = self._settings
        budget = StepBudget(settings.max_num_batched_tokens, settings.max_prefill_chunk)
        builder = PlanBuilder(budget, is_ahead=is_ahead)
        self._state.kv.advance(now_ns)
        if self._state.is_empty:
            self._batching.rest(now_ns)
            return builder
        self._requeue_outgrown()
        self._batching.free_slots(builder)
        claim = self._claim
        if claim is not None and claim.sequence.is_finished:
            claim = None
        self._plan_decodes(builder, claim, now_ns)
        num_left = self._shared.max_prompt_tokens(budget.num_spent, now_ns)
        if num_left is not None:
            budget.keep(num_left if claim is None else max(num_left, claim.num_tokens))
        split = PrefillSplit(
            budget,
            settings.shortest_prefill_share,
            admits_all=self._batching.admits_all,
            claim=claim,
            max_pooled=self._max_pooled(builder),
        )
        for sequence in self._state.running:
            if sequence not in builder.new_blocks and sequence.num_computable_tokens:
                split.add(sequence, is_new=False)
        self._state.update_ready(now_ns)
        self._batching.admit(builder, split, now_ns)
        self._claim = split.next_claim()
        for sequence, num_tokens in split.grants():
            # Planning an earlier row may have preempted this one.
            if sequence.status is SequenceStatus.RUNNING:
                self._compute(sequence, num_tokens, builder)
        add_draft_tokens(self._state, builder, self._num_balanced_tokens)
        return builder

    def _max_pooled(self, builder: PlanBuilder) -> int | None:
        """Return the most tokens of pooled prompts; None: nothing that generates is decoding."""
        if all(isinstance(each.request, PoolRequest) for each in builder.sequences):
            return None
        return self._shared.max_pooled_tokens(builder.budget.num_spent)

    def _requeue_outgrown(self) -> None:
        """Let sequences that have outgrown the rotation of their KV wait, to compute all again.

        They keep their place in the order. What they had computed is of no use on the host.
        """
        for sequence in [s for s in self._state.running if s.is_outgrown and s.is_decoding]:
            self._state.requeue(sequence)

    def _plan_decodes(self, builder: PlanBuilder, claim: SpanClaim | None, now_ns: int) -> None:
        """Plan rows that need one token first: they hold up no other row, but for a claim."""
        # A last position of an image may have to be encoded first, which is no matter of one token.
        decoding = [s for s in self._state.running if s.is_decoding and not s.image_cells]
        searches = [s.request for s in decoding if isinstance(s.request, BeamRequest)]
        in_turn = self._shared.in_turn(searches, now_ns)
        for sequence in decoding:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if claim is not None and claim.yields(sequence, builder.budget):
                continue
            if isinstance(sequence.request, BeamRequest):
                if sequence.request in in_turn:
                    self._beams.plan(builder, sequence.request)
            else:
                self._compute(sequence, 1, builder)

    def _compute(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        new_block_ids = builder.new_blocks.get(sequence)
        if new_block_ids is None:
            new_block_ids = self._grow(sequence, num_tokens, builder)
        elif self._state.kv.is_sparse:
            new_block_ids = self._state.fit(sequence, sequence.num_computed_tokens + num_tokens)
        if new_block_ids is not None:
            builder.compute(sequence, num_tokens, new_block_ids)

    def _grow(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> NewBlocks | None:
        """Return new blocks for the next tokens; None if the sequence gets none in this step.

        Rows that need a block are planned in scheduling order, and preemption takes the last one.
        It takes nothing that is planned already: only a chunk of a prompt may need a block after
        such a row, and then waits for the next step.
        """
        state = self._state
        num_computed = sequence.num_computed_tokens + num_tokens
        while (new_block_ids := state.grow(sequence, num_computed)) is None:
            builder.lacks_blocks = True
            if builder.is_ahead:
                # With a window, the steps in flight have blocks that they free afterwards.
                builder.is_short = True
                return None
            assert state.reservations is None, "a reserved block is gone"
            victim = state.running.last
            if builder.includes(victim):
                return None
            assert len(state.running) > 1, "a sequence that cannot fit alone was accepted"
            builder.preempt(state, victim)
            if victim in sequence.request.scheduled_with(sequence):
                return None
        return new_block_ids
