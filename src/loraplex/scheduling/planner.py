"""What each sequence computes in the next step: first running sequences, then waiting ones."""

from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.memory.block_tables import NewBlocks
from loraplex.scheduling.batching import InflightBatching
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.beam_scheduling import BeamScheduling
from loraplex.scheduling.plan_builder import PlanBuilder, StepBudget
from loraplex.scheduling.prefill import PrefillSplit, SpanClaim
from loraplex.scheduling.request import Sequence, SequenceStatus
from loraplex.scheduling.shared_steps import SharedSteps
from loraplex.scheduling.speculation import add_draft_tokens
from loraplex.scheduling.state import SchedulerState


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
        self._requeue_outgrown()
        self._batching.free_slots(builder)
        claim = self._claim
        if claim is not None and claim.sequence.is_finished:
            claim = None
        self._plan_decodes(builder, claim)
        num_left = self._shared.max_prompt_tokens(budget.num_spent, now_ns)
        if num_left is not None:
            budget.keep(num_left if claim is None else max(num_left, claim.num_tokens))
        split = PrefillSplit(
            budget,
            settings.shortest_prefill_share,
            admits_all=self._batching.admits_all,
            claim=claim,
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

    def _requeue_outgrown(self) -> None:
        """Let sequences that have outgrown the rotation of their KV wait, to compute all again.

        They keep their place in the order. What they had computed is of no use on the host.
        """
        for sequence in [s for s in self._state.running if s.is_decoding and s.is_outgrown]:
            self._state.requeue(sequence)

    def _plan_decodes(self, builder: PlanBuilder, claim: SpanClaim | None) -> None:
        """Plan rows that need one token first: they hold up no other row, but for a claim."""
        # A last position of an image may have to be encoded first, which is no matter of one token.
        for sequence in [s for s in self._state.running if s.is_decoding and not s.image_cells]:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if claim is not None and claim.yields(sequence, builder.budget):
                continue
            if isinstance(sequence.request, BeamRequest):
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
