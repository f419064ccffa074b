"""Continuous (in-flight) batching: any step may admit sequences, and each leaves when it ends."""

from loraplex.core.adapter import AdapterHandle
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.scheduling.adapters import AdapterReadiness, AdapterScan
from loraplex.scheduling.admitter import AdmitResult, Admitter
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.prefill import PrefillSplit
from loraplex.scheduling.queues import AdapterQueue
from loraplex.scheduling.shared_steps import SharedSteps
from loraplex.scheduling.slot_claims import SlotClaims
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
