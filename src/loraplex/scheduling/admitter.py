"""Admission of one waiting sequence: a slot, and blocks for its tokens."""

import enum

from loraplex.core.adapter import AdapterHandle
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.memory.block_tables import AdmittedBlocks, BlockCounts, Loaded
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.beam_scheduling import BeamScheduling
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.prefill import PrefillSplit
from loraplex.scheduling.request import Request, Sequence
from loraplex.scheduling.state import SchedulerState


class AdmitResult(enum.Enum):
    """Outcome of one attempt."""

    ADMITTED = enum.auto()
    LACKS_TOKENS = enum.auto()
    """The step has too few tokens left; a shorter sequence might be admitted."""
    LACKS_CAPACITY = enum.auto()
    """There are too few slots or blocks."""


class Admitter:
    """Gives waiting sequences whose adapters are on the device slots and blocks.

    A sequence takes the blocks of all its tokens at once; with an attention window, those of its
    next chunk.
    """

    def __init__(
        self, state: SchedulerState, beams: BeamScheduling, settings: SchedulerSettings
    ) -> None:
        self._state = state
        self._beams = beams
        self._max_seqs_per_adapter = settings.max_seqs_per_adapter
        self._shortage: tuple[int, BlockCounts] | None = None
        """(sequence id, available blocks) when a sequence last found too few blocks."""

    def adapters_at_limit(self, sequence: Sequence) -> list[AdapterHandle]:
        """Return adapters with which too many sequences would run after this admission."""
        limit, request = self._max_seqs_per_adapter, sequence.request
        if not limit:
            return []
        num_running = self._state.adapters.num_running
        return [h for h in request.handles if num_running(h) + request.num_slots > limit]

    def admit(
        self,
        sequence: Sequence,
        builder: PlanBuilder,
        split: PrefillSplit,
        now_ns: int,
        ready_since_ns: int = 0,
    ) -> AdmitResult:
        """Give a sequence a slot and blocks; `split` decides how many tokens it computes.

        ready_since_ns: when its adapters were first seen on the device.
        """
        request = sequence.request
        if not self._state.slots.num_free:
            return AdmitResult.LACKS_CAPACITY
        if request.num_encoder_tokens and self._awaits_encoding(request):
            return AdmitResult.LACKS_TOKENS
        if not split.has_tokens_for(sequence):
            return AdmitResult.LACKS_TOKENS
        if isinstance(request, BeamRequest):
            if not self._beams.admit(builder, request):
                return AdmitResult.LACKS_CAPACITY
        elif self._take_blocks(sequence, builder):
            builder.join(sequence)
        else:
            return AdmitResult.LACKS_CAPACITY
        if not request.was_scheduled:
            request.was_scheduled = True
            request.num_cached_tokens = sequence.num_cached_tokens
            request.first_scheduled_ns = now_ns
            if request.handles:
                request.adapter_ready_ns = max(ready_since_ns, request.arrival_ns)
            self._state.queue_bound.num_queued -= 1
        if sequence.num_computable_tokens:
            split.add(sequence, is_new=True)
        return AdmitResult.ADMITTED

    def _awaits_encoding(self, request: Request) -> bool:
        """Return whether this step encodes the input in blocks that others could then share.

        Later steps have their rows: if the step fails, what they read was never written.
        """
        donor = request.donor
        return donor is not None and donor.input_to_encode > 0

    def _take_blocks(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Take a slot and blocks; False and no change if there are too few blocks."""
        state = self._state
        num_encoder_tokens = sequence.request.num_encoder_tokens
        num_blocks = state.kv.num_blocks_for(sequence.num_tokens, num_encoder_tokens)
        num_reserved = state.num_blocks_to_leave(sequence, num_blocks)
        if num_reserved is None:
            return False
        pairs = zip(state.kv.num_available, num_reserved, strict=True)
        shortage = (sequence.sequence_id, tuple(available - kept for available, kept in pairs))
        if any(num_reserved) and self._is_known(shortage):
            return False
        sequence.scores_prompt = sequence.request.wants_prompt_scores
        sequence.set_rotation_length()
        offloaded = sequence.offloaded
        if offloaded is not None and not state.hold_images(sequence, offloaded.num_computed_tokens):
            return False
        blocks = self._blocks_for(sequence, num_reserved)
        self._shortage = shortage if blocks is None else None
        if blocks is None:
            state.release_images(sequence)
            return False
        if isinstance(blocks, AdmittedBlocks) and not state.hold_images(
            sequence, blocks.num_cached_tokens
        ):
            state.kv.release(blocks.block_tables)
            return False
        if isinstance(blocks, Loaded):
            state.resume(sequence, blocks)
            builder.block_loads.extend(blocks.transfers)
        else:
            state.admit(sequence, blocks)
        builder.new_blocks[sequence] = tuple(map(tuple, sequence.block_tables))
        return True

    def _blocks_for(
        self, sequence: Sequence, num_reserved: BlockCounts
    ) -> AdmittedBlocks | Loaded | None:
        """Take the blocks of a new sequence, or of one whose KV is on the host."""
        kv, request, offloaded = self._state.kv, sequence.request, sequence.offloaded
        donor = None if request.donor is None else request.donor.block_tables
        if offloaded is not None:
            return kv.load_back(
                sequence.token_ids,
                sequence.kv_salt,
                offloaded.host_tables,
                offloaded.num_computed_tokens,
                sequence.num_tokens,
                later_salts=sequence.later_salts,
                max_step_tokens=request.max_step_tokens,
                num_reserved_blocks=num_reserved,
                donor=donor,
            )
        return kv.admit(
            sequence.token_ids,
            sequence.kv_salt,
            max_new_tokens=sequence.num_tokens,
            max_step_tokens=request.max_step_tokens,
            max_cached_tokens=None if request.takes_hits and not sequence.scores_prompt else 0,
            later_salts=sequence.later_salts,
            num_reserved_blocks=num_reserved,
            retention=request.engine_request.retention,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_encoder_tokens=request.num_encoder_tokens,
            donor=donor,
        )

    def _is_known(self, shortage: tuple[int, BlockCounts]) -> bool:
        """Return whether the sequence found too few blocks before, and there are no more now.

        The test spares looking up a long prompt in every step.
        """
        known = self._shortage
        if known is None or known[0] != shortage[0]:
            return False
        return all(now <= then for now, then in zip(shortage[1], known[1], strict=True))
