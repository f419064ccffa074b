"""What every step computes, and what follows from its result.

The face of the room: it owns the requests from `add` to their last output. It sees no text, no
tensor and no file.
"""

from collections import Counter

from loraplex.core.adapter import AdapterHandle
from loraplex.core.clock import Clock
from loraplex.core.errors import ConfigError, ErrorInfo, LoraplexError
from loraplex.core.output import EngineOutput, FinishReason
from loraplex.core.plan import Capacity, StepPlan, StepResult
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.sequence import SequenceGroup, SequenceStatus
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.absorb import absorb_row
from loraplex.scheduling.active import ActiveRequest, ActiveSequence
from loraplex.scheduling.adapters import CacheFiller, HostLoads
from loraplex.scheduling.admission import QueueBound, beam_refusal, length_refusal
from loraplex.scheduling.beam_group import new_beam_group
from loraplex.scheduling.beam_rows import abort_group
from loraplex.scheduling.deadlines import Deadlines, deadline_error
from loraplex.scheduling.draft import PlanDraft
from loraplex.scheduling.fair_share import FairShares
from loraplex.scheduling.flights import Flight, Flights
from loraplex.scheduling.overlap import projected
from loraplex.scheduling.planner import Planner
from loraplex.scheduling.policy import Policy, PriorityThenArrival
from loraplex.scheduling.report import engine_stats, step_record
from loraplex.scheduling.reservations import new_reservations
from loraplex.scheduling.roster import Roster
from loraplex.scheduling.settings import SchedulerSettings
from loraplex.scheduling.slots import SlotPool
from loraplex.scheduling.speculation import new_drafter
from loraplex.scheduling.stop import StopRules


class Scheduler:
    """add and abort between absorb and plan; then plan, launch, absorb.

    There is no prefill and no decode: every sequence has computed tokens catching up with its
    tokens, and a step lets each compute some of them within one budget. Running sequences come
    first, then waiting ones in policy order. The first sequence in policy order is never
    preempted, so there is always one that makes progress.
    """

    def __init__(
        self,
        capacity: Capacity,
        settings: SchedulerSettings,
        kv: KVBlocks,
        adapters: AdapterCache,
        host: HostLoads,
        clock: Clock,
        policy: Policy | None = None,
    ) -> None:
        """Raises ConfigError if the settings do not suit the capacity."""
        _check_settings(settings, capacity)
        self._settings = settings
        self._max_model_len = capacity.max_model_len
        self._max_num_seqs = capacity.max_num_seqs
        self._max_step_tokens = settings.max_step_tokens
        self._shares_prompts = settings.enable_prefix_cache
        self._clock = clock
        self._policy = policy or PriorityThenArrival()
        self._adapters = CacheFiller(
            adapters, host, settings.adapter_aging_ns, settings.adapter_ttl_ns
        )
        self._roster = Roster(
            kv,
            self._adapters,
            SlotPool(capacity.max_num_seqs),
            QueueBound(settings.max_queue_size, capacity.max_num_seqs),
            clock,
            FairShares(
                settings.fair_share,
                settings.fair_input_weight,
                settings.fair_output_weight,
                settings.fair_resident_lead,
            ),
            new_reservations(settings, kv),
        )
        self._planner = Planner(self._roster, settings, capacity.max_num_seqs)
        self._deadlines = Deadlines(self._roster.find)
        self._flights = Flights(self._roster)
        self._was_short = False
        """Somebody was left out of the last plan ahead: others may have to be preempted for it."""

    def add(self, group: SequenceGroup) -> None:
        """Accept a request, or emit the error that says why not."""
        roster, now_ns = self._roster, self._clock.now_ns()
        handles = tuple(sorted({handle for handle, _ in group.adapters}))
        rules = StopRules(group.request, self._max_model_len)
        refusal = (
            length_refusal(
                group.request, rules, self._max_model_len, roster.kv, self._max_step_tokens
            )
            or beam_refusal(
                group.request,
                rules,
                self._max_num_seqs,
                self._settings.max_seqs_per_adapter,
                roster.kv,
                self._max_step_tokens,
            )
            or self._queue_refusal(group.request)
            or self._adapters.refusal(handles, now_ns)
        )
        if refusal is not None:
            self.refuse(group.request, refusal)
            return
        request = ActiveRequest(group, handles, rules, new_beam_group(group.request, rules))
        sampling = group.request.sampling
        request.wants_prompt_scores = (
            sampling.prompt_logprobs is not None or sampling.return_prompt_logits
        ) and not group.request.prompt_scores_told
        request.num_unfinished = len(group.sequences)
        request.sequences = [
            ActiveSequence(
                request,
                sequence,
                self._policy.key(group, sequence),
                drafter=new_drafter(sampling, self._settings),
            )
            for sequence in group.sequences
        ]
        # Who comes second finds the prompt in the prefix cache, and its scores are needed once.
        shares = self._shares_prompts and len(group.request.prompt_token_ids) > roster.kv.block_size
        shares = shares or request.wants_prompt_scores or request.beams is not None
        roster.accept(request, hold_back=shares)
        self._deadlines.add(request)

    def _queue_refusal(self, request: EngineRequest) -> LoraplexError | None:
        """A request that an engine before this one had accepted has its place."""
        if request.num_restarts:
            return None
        return self._roster.queue_bound.refusal(self._planner.num_seats)

    def refuse(self, request: EngineRequest, error: LoraplexError) -> None:
        """Emit the only output of a request that is not accepted."""
        self._roster.outbox.refused(request, error.to_info())

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End a request, or one sequence of it, now. No change if it ended already."""
        request = self._roster.find(request_id)
        if request is None:
            return
        if request.beams is not None:
            abort_group(self._roster, request)
            return
        # From the end, so that no sequence is enqueued in the place of one that is aborted first.
        for active in reversed(request.sequences):
            if sequence_index in (None, active.sequence.index) and not active.is_finished:
                self._roster.outbox.ended(active, FinishReason.ABORT)
                self._roster.end_sequence(active, FinishReason.ABORT)

    def preload(self, handle: AdapterHandle) -> None:
        """Bring an adapter to the device as soon as there is room that no request wants."""
        self._adapters.preload(handle)

    def is_preloading(self, handle: AdapterHandle) -> bool:
        """Whether a preload was asked for and has not ended."""
        return self._adapters.is_preloading(handle)

    def pin(self, handle: AdapterHandle) -> None:
        """Keep an adapter on the device. Raises AdapterTooLargeError if others then lack room."""
        self._adapters.pin(handle)

    def unpin(self, handle: AdapterHandle) -> None:
        """Undo `pin`."""
        self._adapters.unpin(handle)

    def loaded(self, handle: AdapterHandle, load_ns: int) -> None:
        """Told for the host tier: an adapter is in host memory, after a load that took so long."""
        self._adapters.loaded(handle, load_ns)
        now_ns = self._clock.now_ns()
        for request in self._roster.waiting_for(handle):
            request.group.adapter_load_ns += min(load_ns, max(0, now_ns - request.arrival_ns))

    def load_failed(self, handle: AdapterHandle, error: ErrorInfo) -> None:
        """Told for the host tier: the requests that wait for this adapter end with an error."""
        self._adapters.load_failed(handle, error, self._clock.now_ns())
        self._roster.fail_waiting_for(handle)

    def plan(self) -> StepPlan | None:
        """The next step to launch, then to `absorb` or `fail`; None if there is nothing to launch.

        A plan without rows only starts adapter copies, or asks for the end of those under way.
        """
        assert not self._flights, "a plan is in flight"
        self._was_short = False
        self._expire(self._clock.now_ns())
        draft = self._planner.draft(self._clock.now_ns())
        return self._depart(draft, is_wanted=self._adapters.num_copying > 0)

    def plan_ahead(self) -> StepPlan | None:
        """The step to launch behind the one in flight; None if there is nothing certain to launch.

        It has what can be computed next whatever the one in flight gives, and preempts nobody. Who
        cannot go on without that waits for the plan after next, made with nothing in flight.
        """
        flight = self._flights.only
        if self._was_short:
            return None
        self._expire(self._clock.now_ns())
        with projected(flight.plan.rows, flight.sequences):
            draft = self._planner.draft(self._clock.now_ns(), is_ahead=True)
        self._was_short = draft.is_short
        return self._depart(draft, is_wanted=False)

    def _depart(self, draft: PlanDraft, *, is_wanted: bool) -> StepPlan | None:
        """is_wanted: even if it neither computes nor starts anything."""
        copies = self._adapters.take_copies_to_start()
        if not (draft.num_rows or copies or is_wanted):
            assert not draft.joined, "the runner would not be told who has joined"
            return None
        counts = self._roster.counts
        counts.steps += 1
        plan = draft.build(counts.steps, self._roster.slots.take_removed(), copies)
        self._flights.depart(Flight(plan, draft.sequences, draft.num_preempted, draft.offloaded))
        return plan

    def absorb(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take the result of the oldest plan in flight. Returns everything there is to say."""
        flight = self._flights.land(plan)
        now_ns = self._clock.now_ns()
        rows = zip(plan.rows, result.rows, flight.sequences, strict=True)
        for row, row_result, active in rows:
            assert row.slot == row_result.slot, "the results are not in the plan's order"
            if not active.is_finished:
                absorb_row(self._roster, active, row, row_result, now_ns)
        for handle in result.copies_done:
            copy_ns = result.timing.copy_ns // len(result.copies_done)
            self._adapters.copied(handle, copy_ns)
            for request in self._roster.waiting_for(handle):
                request.group.adapter_copy_ns += copy_ns
        for handle, error in result.copies_failed:
            self._adapters.copy_failed(handle, error, now_ns)
            self._roster.fail_waiting_for(handle)
        return self.take_outputs()

    def fail(self, plan: StepPlan, error: LoraplexError) -> list[EngineOutput]:
        """The oldest plan in flight failed as a whole: its requests end, the others go on.

        What the runner did of it is not known. So nothing that the step computed is kept, and the
        next plan names its removed slots and its adapter copies again. A plan behind it is `void`.
        """
        flight = self._flights.land(plan)
        alive = [active for active in flight.sequences if not active.is_finished]
        for request in dict.fromkeys(active.request for active in alive):
            self._roster.fail_request(request, error.to_info())
        self._undo(flight)
        return self.take_outputs()

    def void(self, plan: StepPlan) -> list[EngineOutput]:
        """A plan in flight is not computed, as the one before it failed: who is in it waits again.

        The runner may have done some of it: nothing of that is used.
        """
        flight = self._flights.land(plan)
        for active in flight.sequences:
            if active.sequence.status is SequenceStatus.RUNNING:
                self._roster.requeue(active)
        self._undo(flight)
        return self.take_outputs()

    def _undo(self, flight: Flight) -> None:
        """What a plan names beside its rows may not have been done."""
        self._roster.slots.remove_again(flight.plan.removed)
        self._adapters.start_again(flight.plan.adapter_copies)
        for active in flight.offloaded:
            self._roster.forget_offloaded(active)

    def take_outputs(self) -> list[EngineOutput]:
        """What there is to say since the last call, when no plan was launched."""
        return self._roster.outbox.take()

    def next_wake_ns(self) -> int | None:
        """When to plan again if nothing happens before; None: not until then.

        While `num_loading` adapters are being loaded, their end is something that happens.
        """
        roster, now_ns = self._roster, self._clock.now_ns()
        if roster.running or roster.outbox or self._adapters.num_copying or self._flights:
            return now_ns
        deadline_ns = self._deadlines.next_ns()
        wakes = [] if deadline_ns is None else [deadline_ns]
        held_until_ns = self._planner.held_until_ns()
        if held_until_ns > now_ns:
            wakes.append(held_until_ns)
        elif roster.waiting and not self._adapters.num_loading:
            wakes.append(now_ns)
        return max(now_ns, min(wakes)) if wakes else None

    def next_expiry_ns(self) -> int | None:
        """When to plan again so that an idle adapter leaves; None: nothing may leave by itself."""
        return self._adapters.next_expiry_ns()

    @property
    def has_unfinished(self) -> bool:
        return not self._roster.is_empty

    @property
    def num_loading(self) -> int:
        """Adapters on their way to the host."""
        return self._adapters.num_loading

    @property
    def num_copying(self) -> int:
        """Adapters on their way to the device."""
        return self._adapters.num_copying

    def adapter_rows(self, plan: StepPlan) -> Counter[AdapterHandle]:
        """How many rows of a plan in flight use each adapter."""
        sequences = self._flights.of(plan).sequences
        return Counter(handle for active in sequences for handle in active.request.handles)

    def record(self, plan: StepPlan, start_ns: int) -> StepRecord:
        """About a plan in flight. How it ends is not known yet."""
        return step_record(self._roster, self._flights.of(plan), start_ns)

    def stats(self) -> EngineStats:
        return engine_stats(self._roster)

    def num_running_by_adapter(self) -> Counter[AdapterHandle]:
        """Sequences that hold a slot."""
        return self._adapters.running

    def num_waiting_by_adapter(self) -> Counter[AdapterHandle]:
        """Sequences that wait for a slot, blocks or an adapter."""
        return self._roster.waiting.num_by_handle()

    def check(self) -> None:
        """Nothing is lost and nothing is counted twice."""
        self._roster.check(self._flights.num_rows())

    def _expire(self, now_ns: int) -> None:
        for request in self._deadlines.take_due(now_ns):
            self._roster.fail_request(request, deadline_error(request).to_info())
        self._adapters.expire(now_ns)


def _check_settings(settings: SchedulerSettings, capacity: Capacity) -> None:
    if settings.max_num_batched_tokens < capacity.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({capacity.max_num_seqs}): every running sequence needs a token",
            param="max_num_batched_tokens",
        )
    if capacity.num_kv_groups != 1:
        raise ConfigError(f"one KV group can be scheduled, the model has {capacity.num_kv_groups}")
