"""Slots that shares with too few of them claim from shares with too many."""

from collections import Counter

from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.fair_share import shares_slots
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.queues import AdapterQueue
from loraplex.scheduling.request import Sequence, ShareKey
from loraplex.scheduling.state import SchedulerState

MAX_PLANS_WITHOUT_SLOT = 4
"""Plans in a row that meet no claim, after which running sequences are preempted. Where outputs
are short, slots come free all the time, and a claim costs no preemption."""
MAX_PLANS_BEFORE_BEAMS = 2
"""The same where a beam search has too many slots: they come free together, at its end."""


class SlotClaims:
    """Claims of waiting shares to their part of the slots.

    The part of a share is its weight's portion of all slots, at least one. A share that has fewer
    claims the others while its sequences find no slot or blocks. If several plans in a row meet no
    claim, the last sequences of shares with more than their part are preempted, and no share is
    admitted beyond its part until a claim is met.

    A share keeps its part, so its first sequences make progress. Beams have their slots together
    and lose them together; they gain a token between two such losses.
    """

    def __init__(
        self, state: SchedulerState, settings: SchedulerSettings, max_num_seqs: int
    ) -> None:
        self._state = state
        self._max_num_seqs = max_num_seqs
        self._has_parts = shares_slots(settings)
        policy = settings.batch_scheduler_policy
        self._may_preempt = policy is not BatchSchedulerPolicy.GUARANTEED_NO_EVICT
        self._priorities: list[int] = []
        """Priority of each claimed slot, in the order of the last plan that admitted sequences."""
        self._num_plans_without = 0
        """Plans in a row that admitted sequences, had claims, and met none."""
        self._open: list[int] = []
        """Claims of the present plan."""
        self._num_open: Counter[ShareKey] = Counter()
        self._is_met = False
        self._is_urgent = False
        """Whether no claim was met for too many plans."""

    def may_admit(self, queue: AdapterQueue, num_kept: int) -> bool:
        """Return whether the head of a queue may take its slots now: all of them, if it is beams.

        Beams that went beyond the part of their share would lose their slots at once. num_kept:
        slots that stay free, unless the share has less than its part and is not the only one, or
        beams need all of them.
        """
        num_slots, num_missing = queue.head.request.num_slots, self._num_missing(queue.share)
        if self._is_urgent:
            return num_missing >= num_slots
        num_left = self._state.slots.num_free - num_slots
        if not 0 <= num_left < num_kept or num_slots > self._max_num_seqs - num_kept:
            return True
        return num_missing >= num_slots and self._state.shares.num_active > 1

    def claim(self, queue: AdapterQueue) -> None:
        """Note that the sequences of a queue could run if there were slots and blocks."""
        if not self._has_parts:
            return
        request, share = queue.head.request, queue.share
        num_missing = self._num_missing(share) - self._num_open[share]
        if request.num_slots > num_missing:  # more than the part of a beam search is never claimed
            return
        num_claimed = min(max(len(queue), request.num_slots), num_missing)
        self._num_open[share] += num_claimed
        self._open += [request.engine_request.priority] * num_claimed

    def admitted(self, share: ShareKey) -> None:
        """Note that a share has taken a slot."""
        self._is_met = self._is_met or self._num_missing(share) >= 0

    def end_plan(self) -> None:
        """Note that a plan has admitted what it could."""
        is_met, self._is_met = self._is_met, False
        self._priorities, self._open = self._open, []
        self._num_open.clear()
        has_claims = bool(self._priorities) and not is_met
        self._num_plans_without = self._num_plans_without + 1 if has_claims else 0

    def free_slots(self, builder: PlanBuilder) -> None:
        """Preempt sequences of shares that have more than their part, one for each urgent claim.

        Claims that lack blocks, but no slots, have one sequence preempted for them in each plan. A
        claim preempts no sequence of higher priority.
        """
        num_plans = self._num_plans_without
        self._is_urgent = num_plans >= MAX_PLANS_WITHOUT_SLOT or (
            num_plans >= MAX_PLANS_BEFORE_BEAMS
            and any(
                isinstance(sequence.request, BeamRequest) and self._is_surplus(sequence)
                for sequence in self._state.running
            )
        )
        if not (self._is_urgent and self._may_preempt):
            return
        num_wanted = max(1, len(self._priorities) - self._state.slots.num_free)
        due = self._priorities[:num_wanted]
        for sequence in reversed(list(self._state.running)):
            if not due:
                return
            if not self._is_surplus(sequence):
                continue
            if sequence.request.engine_request.priority < due[0]:
                return
            del due[: sequence.request.num_slots]
            if builder.is_ahead:
                # A plan that is made with nothing in flight may preempt.
                builder.is_short = True
                return
            builder.preempt(self._state, sequence)

    def _is_surplus(self, sequence: Sequence) -> bool:
        """Return whether a running sequence has a slot beyond its share's part."""
        request = sequence.request
        if sequence.slot is None:  # preempted together with another one
            return False
        if isinstance(request, BeamRequest) and not request.may_give_way:
            return False
        return self._num_missing(request.share) < 0

    def _num_missing(self, share: ShareKey) -> int:
        """Return how many slots a share has less than its part; negative if it has more."""
        part = self._state.shares.part(share, self._max_num_seqs)
        return part - self._state.running.num_of(share)
