"""Beam search as the scheduler's other parts call it: admit, plan, absorb and abort."""

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence

from loraplex.core.errors import InvalidParameterError
from loraplex.core.output import BeamLogprobs, FinishReason, SequenceDelta
from loraplex.memory.block_tables import AdmittedBlocks, BlockCounts
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.beam_request import BeamRequest, Donor, Fork
from loraplex.scheduling.beams import Candidates
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.request import Sequence
from loraplex.scheduling.state import SchedulerState


class BeamScheduling:
    """Moves beams as rows: they take slots together, share blocks, fork and end together."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def admit(self, builder: PlanBuilder, request: BeamRequest) -> bool:
        """Give all sequences slots, and the beams blocks for all their tokens.

        False and no change if there are too few slots or blocks. Nothing is computed by this.
        Preempted beams continue where they were: each shares the blocks of its longest common
        beginning with an earlier beam, and computes the rest again.
        """
        state, kv = self._state, self._state.kv
        if state.slots.num_free < request.width:
            return False
        request.restart()
        first = request.sequences[0]
        first.set_rotation_length()
        for sequence in request.sequences:
            sequence.rotation_length = first.rotation_length
        texts = [request.sequences[index].token_ids for index in request.holders]
        shared = _longest_shared(texts, kv)
        admission = self._admit_first(request, shared)
        if admission is None:
            return False
        starts = [num_shared * kv.block_size for _, num_shared in shared]
        starts[0] = admission.num_cached_tokens
        if not self._hold_images(request, starts):
            kv.release(admission.block_tables)
            return False
        admissions = [admission]
        for text, (donor, num_shared) in zip(texts[1:], shared[1:], strict=True):
            num_cached = num_shared * kv.block_size
            shared_tables = [
                table[:count]
                for table, count in zip(
                    admissions[donor].block_tables,
                    kv.num_blocks_for(num_cached, request.num_encoder_tokens),
                    strict=True,
                )
            ]
            kv.share(shared_tables)
            more = kv.grow(shared_tables, len(text))
            assert more is not None, "the admission of the first beam left too few blocks"
            tables = [[*table, *new] for table, new in zip(shared_tables, more, strict=True)]
            # Its states are taken chunk by chunk, when the beams before it are computed.
            kv.fit(tables, num_cached, num_cached, num_cached, 0)
            admissions.append(AdmittedBlocks(tables, num_cached, 0))
        idle = [AdmittedBlocks([], 0, 0) for _ in request.idle]
        for sequence, its_admission in zip(request.sequences, [*admissions, *idle], strict=True):
            state.admit(sequence, its_admission)
            builder.join(sequence)
            builder.new_blocks[sequence] = tuple(map(tuple, sequence.block_tables))
        request.donors = {
            index: Donor(index - 1, len(texts[index - 1]) - 1)
            if kv.is_sparse
            else Donor(shared[index][0], starts[index])
            for index in range(1, len(texts))
        }
        return True

    def plan(self, builder: PlanBuilder, request: BeamRequest) -> None:
        """Compute the newest token of every beam in one step, or preempt all beams.

        The first sequence of the request in scheduling order stands for all of them.
        """
        beams = [request.sequences[index] for index in sorted(request.holders)]
        if builder.budget.num_left < len(beams) or not self._make_space(builder, request, beams):
            return
        for sequence in beams:
            if sequence.index in request.rejoining:
                self._rejoin(builder, sequence)
            new_block_ids = self._state.grow(sequence, sequence.num_tokens)
            assert new_block_ids is not None, "there were blocks for all beams"
            builder.compute(sequence, 1, new_block_ids)
        request.rejoining.clear()
        # Idle sequences are part of the plan, too: they must not be preempted after it.
        builder.new_blocks.update((sequence, ()) for sequence in request.sequences)

    def absorb(
        self, request: BeamRequest, sequence: Sequence, candidates: Candidates, now_ns: int
    ) -> None:
        """Take the candidates of one beam. After the last one, every beam gains a token."""
        self._state.count_output(sequence, 1)
        if not request.take(sequence.index, candidates):
            return
        request.first_token_ns = request.first_token_ns or now_ns
        request.last_token_ns = now_ns
        forks = request.advance()
        if request.search.is_over:
            self._end(request)
            return
        for fork in forks:
            self._take_over(request, fork)
        for index in request.idle:
            self._drop_blocks(request.sequences[index])
        request.assign_tokens()

    def abort(self, request: BeamRequest) -> None:
        """End the request without a hypothesis."""
        for index in range(request.sampling.n):
            delta = SequenceDelta(index, finish_reason=FinishReason.ABORT)
            self._state.outputs.add(request, delta)
        for sequence in reversed(request.sequences):
            self._state.end_sequence(sequence, FinishReason.ABORT)

    def _hold_images(self, request: BeamRequest, starts: AbstractSequence[int]) -> bool:
        """Hold the images that the beams have yet to compute; False and no change if it fails."""
        beams = [request.sequences[index] for index in request.holders]
        for number, (sequence, start) in enumerate(zip(beams, starts, strict=True)):
            if not self._state.hold_images(sequence, start):
                for other in beams[:number]:
                    self._state.release_images(other)
                return False
        return True

    def _admit_first(
        self, request: BeamRequest, shared: AbstractSequence[tuple[int, int]]
    ) -> AdmittedBlocks | None:
        """Take the blocks of the first beam if there are enough for the others, too."""
        kv, first = self._state.kv, request.sequences[0]
        num_encoded = request.num_encoder_tokens
        num_of_first = num_of_all = _num_blocks(kv, first.num_tokens, num_encoded)
        for index, (_, num_shared) in zip(request.holders[1:], shared[1:], strict=True):
            num_whole = _num_blocks(kv, request.sequences[index].num_tokens, num_encoded)
            num_common = _num_blocks(kv, num_shared * kv.block_size, num_encoded)
            counts = zip(num_of_all, num_whole, num_common, strict=True)
            num_of_all = tuple(count + whole - common for count, whole, common in counts)
        num_to_leave = self._state.num_blocks_to_leave(first, num_of_all)
        if num_to_leave is None:
            return None
        first.scores_prompt = request.wants_prompt_scores
        return kv.admit(
            first.token_ids,
            first.kv_salt,
            max_new_tokens=first.num_tokens,
            max_cached_tokens=self._max_cached_tokens(first, shared),
            later_salts=first.later_salts,
            num_reserved_blocks=tuple(
                num_all - num_own + num_left
                for num_all, num_own, num_left in zip(
                    num_of_all, num_of_first, num_to_leave, strict=True
                )
            ),
            retention=request.engine_request.retention,
            num_prompt_tokens=first.num_prompt_tokens,
            num_encoder_tokens=num_encoded,
        )

    def _max_cached_tokens(self, first: Sequence, shared: AbstractSequence[tuple[int, int]]) -> int:
        """Return how many tokens of the first beam the prefix cache may serve."""
        kv = self._state.kv
        if first.scores_prompt:
            return 0
        if len(shared) == 1:
            return first.num_tokens - 1
        # The newest token waits for the other beams. One more is left to compute, because a plan
        # without rows is not launched, and the runner would not get the rows that join.
        limit = first.num_tokens - 2
        if kv.frees_early and not kv.is_sparse:
            # Served blocks that the window has passed are gaps: the other beams may need them.
            limit = min(limit, min(num_shared for _, num_shared in shared[1:]) * kv.block_size)
        return limit

    def _make_space(
        self, builder: PlanBuilder, request: BeamRequest, beams: AbstractSequence[Sequence]
    ) -> bool:
        """Preempt later sequences until there are blocks for all beams.

        False if the beams themselves were preempted, or nothing may be preempted.
        """
        state = self._state
        wanted = [self._num_blocks_wanted(request, sequence) for sequence in beams]
        num_wanted = [sum(counts) for counts in zip(*wanted, strict=True)]
        while any(
            available < count
            for available, count in zip(state.kv.num_available, num_wanted, strict=True)
        ):
            builder.lacks_blocks = True
            if builder.is_ahead:
                builder.is_short = True
                return False
            victim = state.running.last
            builder.preempt(state, victim)
            if victim.request is request:
                return False
        return True

    def _num_blocks_wanted(self, request: BeamRequest, sequence: Sequence) -> BlockCounts:
        kv, position = self._state.kv, sequence.num_computed_tokens
        num_missing = kv.num_missing(sequence.block_tables, sequence.num_tokens)
        is_new = sequence.index in request.rejoining
        copies = is_new and position % kv.block_size > 0
        return tuple(
            count + (copies and group.policy.is_writable(position))
            for group, count in zip(kv.groups, num_missing, strict=True)
        )

    def _rejoin(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Let the row leave and join with the tokens that the sequence took over.

        The sequence may write to its last block only if no other one uses it, so a shared last
        block is copied.
        """
        state = self._state
        assert sequence.slot is not None
        state.slots.rejoin(sequence.slot)
        builder.join(sequence)
        if sequence.num_computed_tokens % state.kv.block_size:
            copies = state.kv.make_writable(sequence.block_tables, sequence.num_computed_tokens)
            assert copies is not None, "there were blocks for all beams"
            builder.copy(copies)
            state.update_reservation(sequence)

    def _take_over(self, request: BeamRequest, fork: Fork) -> None:
        """Let the target share all blocks of the source. It copies a block before it writes."""
        target, source = request.sequences[fork.target], request.sequences[fork.source]
        self._state.kv.share(source.block_tables)
        self._drop_blocks(target)
        target.block_tables = [list(table) for table in source.block_tables]
        target.num_computed_tokens = source.num_computed_tokens
        target.num_hashed_blocks = source.num_hashed_blocks
        self._state.update_reservation(target)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self._state.kv.release(sequence.block_tables)
        sequence.forget_blocks()
        self._state.update_reservation(sequence)

    def _end(self, request: BeamRequest) -> None:
        """Output the best hypotheses in their order, and end the request."""
        state, num_wanted = self._state, request.sampling.n
        hypotheses = request.search.hypotheses[:num_wanted]
        if len(hypotheses) < num_wanted:
            error = InvalidParameterError(
                f"n is {num_wanted}, but the beam search found only {len(hypotheses)} outputs that "
                "the request allows",
                param="n",
            )
            state.fail_request(request, error.to_info())
            return
        wants_scores = request.sampling.logprobs is not None
        for index, (beam, _, stop) in enumerate(hypotheses):
            delta = SequenceDelta(
                index,
                beam.token_ids,
                BeamLogprobs.of(beam.scores) if wants_scores else (),
                stop.reason,
                stop.stop_token_id,
                cumulative_logprob=beam.logprob,
            )
            state.outputs.add(request, delta)
            state.counts.generation_tokens += len(beam.token_ids)
        for sequence in request.sequences:
            state.end_sequence(sequence, hypotheses[0].stop.reason)


def _num_blocks(kv: KVBlocks, num_tokens: int, num_encoder_tokens: int) -> BlockCounts:
    """Return the number of blocks that a sequence without tables takes."""
    return kv.num_missing([], num_tokens, num_encoder_tokens=num_encoder_tokens)


def _longest_shared(texts: Iterable[list[int]], kv: KVBlocks) -> list[tuple[int, int]]:
    """Return for each text an earlier one that shares the most whole blocks, and how many.

    The block of the last token of either text is not shared: it is still to be computed. Nothing
    is shared with a group that keeps states, because the donor's are not computed yet.
    """
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    """Beginnings of texts, by the beginning that is a block shorter and its last block."""
    owners = [0]
    """The first text with each of the beginnings."""
    shared = []
    for number, text in enumerate(texts):
        node = donor = num_shared = 0
        ends = range(kv.block_size, len(text), kv.block_size)
        for end in () if kv.is_sparse else ends:
            block = tuple(text[end - kv.block_size : end])
            node = nodes.setdefault((node, block), len(owners))
            if node == len(owners):
                owners.append(number)
            elif owners[node] != number:
                donor, num_shared = owners[node], num_shared + 1
        shared.append((donor, num_shared))
    return shared
