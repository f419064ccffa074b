"""Static batching (V1): a batch is formed and runs to the end of all its requests."""

from loraplex.scheduling.adapters import AdapterReadiness
from loraplex.scheduling.admitter import AdmitResult
from loraplex.scheduling.batching import InflightBatching
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.prefill import PrefillSplit
from loraplex.scheduling.request import Request, Sequence, SequenceStatus


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
