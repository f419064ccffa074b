"""The scheduler: what every step computes, and what follows from its result.

It owns the requests from `add` to their last output. It handles no text, no tensor and no file.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from loraplex.core.adapter import AdapterHandle
from loraplex.core.cache import States
from loraplex.core.clock import Clock
from loraplex.core.errors import ConfigError, ErrorInfo, LoraplexError
from loraplex.core.output import EngineOutput, FinishReason, SequenceDelta
from loraplex.core.plan import Capacity, StepPlan, StepResult
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import Batching, SchedulerSettings
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.core.task import Pool
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.absorb import ResultAbsorber
from loraplex.scheduling.adapters import CacheFiller, HostLoads
from loraplex.scheduling.admitter import Admitter
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.beam_scheduling import BeamScheduling
from loraplex.scheduling.deadlines import Deadlines, deadline_error
from loraplex.scheduling.fair_share import FairShares, SharedSteps, max_seqs_per_request
from loraplex.scheduling.pending_steps import PendingStep, PendingSteps
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.planner import InflightBatching, Planner, StaticBatching
from loraplex.scheduling.pool_request import PoolRequest
from loraplex.scheduling.projection import projected
from loraplex.scheduling.prompt_lookup import Drafter, PromptIndex
from loraplex.scheduling.queues import QueueBound
from loraplex.scheduling.report import engine_stats, step_record
from loraplex.scheduling.request import (
    EngineLimits,
    Request,
    Sequence,
    SequenceStatus,
    Span,
    StopRules,
)
from loraplex.scheduling.reservations import new_reservations
from loraplex.scheduling.running import SlotPool
from loraplex.scheduling.state import SchedulerState


class Scheduler:
    """Plans steps and absorbs their results.

    Call `add` and `abort` between `absorb` and `plan`; then plan, launch, absorb.

    There is no prefill and no decode: every sequence has computed tokens catching up with its
    tokens, and a step lets each compute some of them within one budget. Running sequences come
    first, then waiting ones. The first sequence in scheduling order is never preempted, so there
    is always one that makes progress.
    """

    def __init__(
        self,
        capacity: Capacity,
        settings: SchedulerSettings,
        kv: KVBlocks,
        adapters: AdapterCache,
        host: HostLoads,
        clock: Clock,
        *,
        overlap: bool = False,
    ) -> None:
        """Raises ConfigError if the settings do not suit the capacity."""
        _check_settings(settings, capacity)
        longest = kv.max_blocks_held(
            capacity.max_model_len - 1, settings.max_step_tokens, capacity.longest_encoder_input
        )
        self._limits = EngineLimits(capacity, kv, settings, kv.shortage(longest) is None)
        self._clock = clock
        self._factory = RequestFactory(capacity, settings)
        self.adapters = _cache_filler(adapters, host, settings)
        self._state = SchedulerState(
            kv,
            self.adapters,
            SlotPool(capacity.max_num_seqs),
            QueueBound(settings.max_queue_size, capacity.max_num_seqs),
            clock,
            FairShares(
                settings.share_kind,
                settings.fair_input_weight,
                settings.fair_output_weight,
                settings.fair_resident_lead,
            ),
            max_seqs_per_request(settings, capacity.max_num_seqs),
            new_reservations(settings, kv),
            num_image_cells=0 if capacity.images is None else capacity.images.num_cells,
        )
        self._beams = BeamScheduling(self._state)
        admitter = Admitter(self._state, self._beams, settings)
        batching = StaticBatching if settings.batching is Batching.STATIC else InflightBatching
        self._shared = SharedSteps(settings)
        self._batching = batching(
            self._state, admitter, settings, capacity.max_num_seqs, self._shared
        )
        self._planner = Planner(
            self._state,
            self._batching,
            self._beams,
            settings,
            capacity.num_balanced_tokens,
            self._shared,
        )
        self._absorber = ResultAbsorber(self._state, self._beams)
        self._deadlines = Deadlines(self._state.find)
        self._steps = PendingSteps(self._state, num_stages=capacity.num_stages, overlap=overlap)
        self._was_short = False
        """The last plan ahead left a sequence out that may need others to be preempted."""

    @property
    def max_in_flight(self) -> int:
        """Maximum number of plans that were launched and not absorbed."""
        return self._steps.max_steps

    def add(
        self, engine_request: EngineRequest, adapters: tuple[tuple[AdapterHandle, float], ...]
    ) -> None:
        """Accept a request, or emit the error that refuses it.

        adapters: handle and scale of each of its adapters.
        """
        request = self._factory.make(engine_request, adapters)
        refusal = request.refusal(self._limits)
        # A request that an engine before this one had accepted has its place in the queue.
        if refusal is None and not engine_request.num_restarts:
            refusal = self._state.queue_bound.refusal(self._batching.num_admissible)
        now_ns = self._clock.now_ns()
        refusal = refusal or self.adapters.cache.refusal(request.handles, now_ns)
        if refusal is not None:
            self.refuse(engine_request, refusal)
            return
        self._shared.arrived(engine_request.tenant, now_ns)
        # A later sequence finds the prompt in the prefix cache, and its scores are needed once.
        shares_prompt = (
            self._state.kv.prefix_caching
            and len(engine_request.prompt_token_ids) > self._state.kv.block_size
        )
        hold_back = len(request.sequences) > 1 and (
            shares_prompt
            or request.wants_prompt_scores
            or request.num_slots > 1
            or request.num_encoder_tokens > 0  # a later sequence shares what the first one encodes
        )
        self._state.accept(request, hold_back=hold_back)
        self._deadlines.add(request)

    def refuse(self, request: EngineRequest, error: LoraplexError) -> None:
        """Emit the only output of a request that is not accepted."""
        self._state.outputs.refuse(request, error.to_info())

    def abort(self, request_id: RequestId, sequence_index: int | None = None) -> None:
        """End a request, or one sequence of it, now. No change if it ended already."""
        request = self._state.find(request_id)
        if request is None:
            return
        if isinstance(request, BeamRequest):
            self._beams.abort(request)
            return
        # From the end, so that no sequence is enqueued in the place of one that is aborted first.
        for sequence in reversed(request.sequences):
            if sequence_index in (None, sequence.index) and not sequence.is_finished:
                delta = SequenceDelta(sequence.index, finish_reason=FinishReason.ABORT)
                self._state.outputs.add(request, delta)
                self._state.end_sequence(sequence, FinishReason.ABORT)

    def loaded(self, handle: AdapterHandle, load_ns: int) -> None:
        """Note that an adapter is in host memory now, after a load that took load_ns."""
        self.adapters.cache.loaded(handle, load_ns)
        now_ns = self._clock.now_ns()
        for request in self._state.waiting_for(handle):
            request.adapter_load_ns += min(load_ns, max(0, now_ns - request.arrival_ns))

    def load_failed(self, handle: AdapterHandle, error: ErrorInfo) -> None:
        """Note that a load failed: the requests that wait for the adapter end with an error."""
        self.adapters.load_failed(handle, error, self._clock.now_ns())
        self._state.fail_waiting_for(handle)

    def plan(self) -> StepPlan | None:
        """Return the next step to launch, then to `absorb` or `fail`; None if there is none.

        A plan without rows only starts adapter copies, or waits for the end of started ones.

        While others are in flight, the plan has what can be computed next whatever their results,
        and preempts no sequence. If a sequence cannot continue without a preemption, no other plan
        is made until all results are absorbed. Call it only with less than `max_in_flight` plans.
        """
        is_ahead = bool(self._steps)
        if is_ahead and self._was_short:
            return None
        now_ns, running = self._clock.now_ns(), self._state.running
        for request in self._deadlines.take_due(now_ns):
            self._state.fail_request(request, deadline_error(request).to_info())
        self.adapters.expire(now_ns)
        with nullcontext() if self._state.is_empty else projected(self._steps, running):
            builder = self._planner.plan(now_ns, is_ahead=is_ahead)
        self._was_short = builder.is_short
        return self._launch(builder, is_wanted=not is_ahead and self.adapters.num_copying > 0)

    def _launch(self, builder: PlanBuilder, *, is_wanted: bool) -> StepPlan | None:
        """is_wanted: launch even a plan that neither computes nor starts anything."""
        copies = self.adapters.take_copies_to_start()
        if not (builder.num_rows or copies or is_wanted):
            assert not builder.joined, "the runner would not get the rows that joined"
            return None
        counts = self._state.counts
        counts.steps += 1
        plan = builder.build(counts.steps, self._state.slots.take_removed(), copies)
        for sequence in builder.sequences:
            sequence.request.first_step = sequence.request.first_step or plan.step_id
        for sequence, num_encoded in builder.num_encoded.items():
            self._state.shares.charge(sequence.request.share, num_encoded, 0)
        step = PendingStep(
            plan,
            builder.sequences,
            builder.budget.num_spent,
            builder.num_preempted,
            builder.offloaded,
        )
        self._steps.launch(step)
        return plan

    def absorb(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take the result of the oldest plan in flight; return all outputs that are due."""
        step = self._steps.end(plan)
        now_ns = self._clock.now_ns()
        self._shared.measured(step.num_tokens, result.timing)
        rows = zip(plan.rows, result.rows, step.sequences, strict=True)
        for row, row_result, sequence in rows:
            assert row.slot == row_result.slot, "the results are not in the plan's order"
            if not sequence.is_finished:
                sequence.request.last_step = plan.step_id
                self._absorber.absorb(sequence, row, row_result, now_ns)
        if plan.encodes:
            self._lose_images(plan, result)
        for handle in result.copies_done:
            copy_ns = result.timing.copy_ns // len(result.copies_done)
            self.adapters.copied(handle, copy_ns)
            for request in self._state.waiting_for(handle):
                request.adapter_copy_ns += copy_ns
        for handle, error in result.copies_failed:
            self.adapters.copy_failed(handle, error, now_ns)
            self._state.fail_waiting_for(handle)
        return self.take_outputs()

    def fail(self, plan: StepPlan, error: LoraplexError) -> list[EngineOutput]:
        """End the requests of the oldest plan in flight, which failed as a whole.

        How much of it the runner did is not known. So nothing that the step computed is kept, and
        the next plan names its removed slots and its adapter copies again. A plan launched after
        it is `void`.
        """
        step = self._steps.end(plan)
        alive = [sequence for sequence in step.sequences if not sequence.is_finished]
        for request in dict.fromkeys(sequence.request for sequence in alive):
            self._state.fail_request(request, error.to_info())
        self._undo(step)
        return self.take_outputs()

    def void(self, plan: StepPlan) -> list[EngineOutput]:
        """Requeue the sequences of a plan in flight, because the plan before it failed.

        The runner may have done some of it: nothing of that is used.
        """
        step = self._steps.end(plan)
        for sequence in step.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._state.requeue(sequence)
        self._undo(step)
        return self.take_outputs()

    def _lose_images(self, plan: StepPlan, result: StepResult) -> None:
        """Let images be encoded again if a row failed that reads them: that may be the reason."""
        pairs = zip(plan.rows, result.rows, strict=True)
        failed = {cell for row, end in pairs if end.error is not None for cell in row.image_cells}
        for encode in plan.encoded_images:
            if encode.cell in failed:
                self._state.images.lose(encode.cell)

    def _undo(self, step: PendingStep) -> None:
        """Repeat or drop what a plan names besides its rows, which may not have been done."""
        for encode in step.plan.encoded_images:
            self._state.images.lose(encode.cell)
        self._state.slots.remove_again(step.plan.removed)
        self.adapters.start_again(step.plan.adapter_copies)
        for sequence in step.offloaded:
            self._state.drop_offloaded(sequence)

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs since the last call, when no plan was launched."""
        return self._state.outputs.take()

    def next_wake_ns(self) -> int | None:
        """Return when to plan again if no event comes earlier; None: only after an event.

        While `num_loading` adapters are being loaded, their end is an event.
        """
        state, now_ns = self._state, self._clock.now_ns()
        if state.running or state.outputs or self.adapters.num_copying or self._steps:
            return now_ns
        deadline_ns = self._deadlines.next_ns()
        wakes = [] if deadline_ns is None else [deadline_ns]
        held_until_ns = self._batching.held_until_ns()
        if held_until_ns > now_ns:
            wakes.append(held_until_ns)
        elif state.waiting and not self.adapters.num_loading:
            wakes.append(now_ns)
        return max(now_ns, min(wakes)) if wakes else None

    @property
    def has_unfinished(self) -> bool:
        return not self._state.is_empty

    def record(
        self, plan: StepPlan, start_ns: int, digest: Callable[[AdapterHandle], str]
    ) -> StepRecord:
        """Return the record of a plan in flight, without its result."""
        return step_record(self._state, self._steps.find(plan), start_ns, digest)

    def stats(self) -> EngineStats:
        return engine_stats(self._state)

    def num_waiting_by_adapter(self) -> Counter[AdapterHandle]:
        """Return how many sequences that wait for a slot, blocks or an adapter need each one."""
        return self._state.waiting.num_by_handle()

    def check(self) -> None:
        """Assert that nothing is lost and nothing is counted twice."""
        self._state.check(self._steps.num_rows())


def _cache_filler(
    adapters: AdapterCache, host: HostLoads, settings: SchedulerSettings
) -> CacheFiller:
    ttl_seconds = settings.lora_ttl_seconds
    return CacheFiller(
        adapters,
        host,
        aging_ns=int(settings.adapter_aging_seconds * 1e9),
        ttl_ns=None if ttl_seconds is None else int(ttl_seconds * 1e9),
    )


def _check_settings(settings: SchedulerSettings, capacity: Capacity) -> None:
    if settings.max_num_batched_tokens < capacity.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({capacity.max_num_seqs}): every running sequence needs a token",
            param="max_num_batched_tokens",
        )
    for group in capacity.cache_groups:
        if isinstance(group.spec, States) and settings.state_checkpoint_tokens % group.spec.every:
            raise ConfigError(
                f"state_checkpoint_tokens ({settings.state_checkpoint_tokens}) must be a multiple "
                f"of {group.spec.every}: the model keeps a state so many tokens apart",
                param="state_checkpoint_tokens",
            )


class RequestFactory:
    """Makes requests whose sequences have unique ids."""

    def __init__(self, capacity: Capacity, settings: SchedulerSettings) -> None:
        self._capacity = capacity
        self._settings = settings
        self._max_step_tokens = settings.max_step_tokens
        self._sequence_ids = itertools.count(1)

    def make(
        self, engine_request: EngineRequest, adapters: tuple[tuple[AdapterHandle, float], ...]
    ) -> Request:
        """Return a request with its unfinished sequences.

        After a crash, the sequences continue from the tokens that the former engine had output.
        """
        if isinstance(engine_request.task, Pool):
            return self._pooled(engine_request, adapters)
        sampling = engine_request.sampling
        rules = StopRules(engine_request, self._capacity.max_model_len)
        new_request = Request if sampling.beam is None else BeamRequest
        request = new_request(engine_request, adapters, rules)
        request.rotation_border = self._capacity.rotation_border
        request.wants_prompt_scores = (
            sampling.prompt_logprobs is not None or sampling.return_prompt_logits
        ) and not engine_request.prompt_scores_delivered
        request.max_step_tokens = self._max_step_tokens
        if engine_request.images:
            self._set_spans(request)
        outputs = dict(enumerate(engine_request.outputs))
        prompt = engine_request.prompt_token_ids
        drafters = new_drafters(sampling, self._settings, len(prompt))
        request.sequences = [
            Sequence(
                request,
                sequence_id=next(self._sequence_ids),
                index=index,
                token_ids=[*prompt, *outputs.get(index, ())],
                num_prompt_tokens=len(prompt),
                seed=engine_request.request_id if sampling.seed is None else sampling.seed,
                drafter=next(drafters),
            )
            for index in range(sampling.num_sequences)
            if index not in engine_request.ended
        ]
        request.num_unfinished = len(request.sequences)
        return request

    def _pooled(
        self, engine_request: EngineRequest, adapters: tuple[tuple[AdapterHandle, float], ...]
    ) -> PoolRequest:
        request = PoolRequest(engine_request, adapters)
        request.rotation_border = self._capacity.rotation_border
        prompt = list(engine_request.prompt_token_ids)
        request.max_step_tokens = self._max_step_tokens
        if engine_request.images:
            self._set_spans(request)
        if request.pool.kind.needs_whole_prompt or not self._capacity.is_causal:
            request.whole_spans = (Span(0, len(prompt)),)
            request.max_step_tokens = max(self._max_step_tokens, len(prompt))
            request.takes_hits = False
        sequence_id = next(self._sequence_ids)
        request.sequences = [Sequence(request, sequence_id, 0, prompt, len(prompt), seed=0)]
        request.num_unfinished = 1
        return request

    def _set_spans(self, request: Request) -> None:
        """Set the spans of images. A prefix hit may end inside one."""
        images = self._capacity.images
        if images is not None and images.is_whole:
            request.whole_spans = tuple(Span(image.first, image.end) for image in request.images)
            request.max_step_tokens = max(self._max_step_tokens, request.longest_span)


def new_drafters(
    sampling: SamplingParams, settings: SchedulerSettings, num_prompt_tokens: int
) -> Iterator[Drafter | None]:
    """Return the drafters of a request's sequences; None for those without a source of drafts.

    They share the index of its prompt.
    """
    num_draft_tokens = settings.num_draft_tokens
    if sampling.num_draft_tokens is not None:
        num_draft_tokens = sampling.num_draft_tokens
    # Beam search needs the candidates at every position: a draft token would save nothing.
    if sampling.beam is not None or not (num_draft_tokens or sampling.grammar is not None):
        return itertools.repeat(None)
    prompt = PromptIndex(num_prompt_tokens, settings.max_draft_ngram, settings.max_draft_window)
    return (Drafter(num_draft_tokens, prompt) for _ in itertools.count())
