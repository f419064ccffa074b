"""Beams as rows: they take slots together, share blocks, fork, are planned and end together."""

from collections.abc import Sequence

from loraplex.core.errors import InvalidParameterError
from loraplex.core.output import FinishReason, SequenceDelta
from loraplex.memory.kv_blocks import Admission
from loraplex.scheduling.active import ActiveRequest, ActiveSequence
from loraplex.scheduling.beam_group import BeamGroup, Fork
from loraplex.scheduling.beams import Candidates
from loraplex.scheduling.draft import PlanDraft
from loraplex.scheduling.roster import Roster

# ---- taking slots -----------------------------------------------------------------------------


def seat_group(roster: Roster, draft: PlanDraft, request: ActiveRequest) -> bool:
    """Give all sequences of a search slots, and its beams blocks for all their tokens.

    False and no change if there is no room. Nothing is computed by this. Beams that were preempted
    go on where they were: each shares the blocks of what it has in common with one before it, and
    computes the rest again.
    """
    group, kv = _group_of(request), roster.kv
    if roster.slots.num_free < group.width:
        return False
    group.restart()
    _hand_out_tokens(request)
    texts = [request.sequences[index].sequence.token_ids for index in group.holders]
    shared = [_longest_shared(texts, i, kv.block_size) for i in range(len(texts))]
    admission = _admit_first(roster, request, shared)
    if admission is None:
        return False
    admissions = [admission]
    for text, (donor, num_shared) in zip(texts[1:], shared[1:], strict=True):
        table = admissions[donor].block_ids[:num_shared]
        kv.share(table)
        more = kv.grow(table, len(text))
        assert more is not None, "the admission of the first beam left too little"
        admissions.append(Admission([*table, *more], num_shared * kv.block_size, 0))
    idle = [Admission([], 0, 0) for _ in group.idle]
    for active, of_active in zip(request.sequences, [*admissions, *idle], strict=True):
        roster.seat(active, of_active)
        draft.join(active)
        draft.named[active] = active.sequence.block_ids
    return True


def _hand_out_tokens(request: ActiveRequest) -> None:
    """Every beam's tokens go to the sequence that holds it."""
    group, prompt = _group_of(request), request.group.request.prompt_token_ids
    for active in request.sequences:
        active.sequence.token_ids = list(prompt)
    for index, beam in zip(group.holders, group.search.beams, strict=True):
        request.sequences[index].sequence.token_ids.extend(beam.token_ids)


def _longest_shared(texts: Sequence[list[int]], index: int, block_size: int) -> tuple[int, int]:
    """(which text before the index-th begins like it, for how many whole blocks).

    Of neither the last token's block is shared: it is still to be computed.
    """
    best = (0, 0)
    text = texts[index]
    for donor in range(index):
        other = texts[donor]
        num_blocks, end = 0, block_size
        while (
            end < min(len(text), len(other))
            and text[end - block_size : end] == (other[end - block_size : end])
        ):
            num_blocks, end = num_blocks + 1, end + block_size
        best = max(best, (donor, num_blocks), key=lambda choice: choice[1])
    return best


def _admit_first(
    roster: Roster, request: ActiveRequest, shared: Sequence[tuple[int, int]]
) -> Admission | None:
    """Blocks of the first beam, if those of the others are there, too."""
    kv, first = roster.kv, request.sequences[0]
    num_tokens = [request.sequences[i].sequence.num_tokens for i in _group_of(request).holders]
    num_tables = [kv.num_blocks_for(n) for n in num_tokens]
    num_of_others = sum(num_tables[1:]) - sum(num_shared for _, num_shared in shared[1:])
    num_to_leave = roster.num_blocks_to_leave(first, num_tables[0] + num_of_others)
    if num_to_leave is None:
        return None
    first.scores_prompt = request.wants_prompt_scores
    return kv.admit(
        first.sequence.token_ids,
        request.group.request.kv_salt,
        max_new_tokens=first.sequence.num_tokens,
        max_cached_tokens=_max_cached_tokens(roster, first, shared),
        num_reserved_blocks=num_of_others + num_to_leave,
        retention=request.group.request.retention,
        num_prompt_tokens=first.sequence.num_prompt_tokens,
    )


def _max_cached_tokens(
    roster: Roster, first: ActiveSequence, shared: Sequence[tuple[int, int]]
) -> int:
    """So much of the first beam's tokens the prefix cache may give."""
    num_tokens = first.sequence.num_tokens
    if first.scores_prompt:
        return 0
    if len(shared) == 1:
        return num_tokens - 1
    # The newest token waits for the other beams. Another one is left to compute, because a plan
    # without rows is not launched, and nobody would be told who has joined.
    limit = num_tokens - 2
    if roster.kv.has_window:
        # Of what the cache gives, blocks behind the window are gaps: the other beams may see them.
        limit = min(limit, min(num_shared for _, num_shared in shared[1:]) * roster.kv.block_size)
    return limit


# ---- planning ---------------------------------------------------------------------------------


def plan_group(roster: Roster, draft: PlanDraft, request: ActiveRequest) -> None:
    """The newest token of every beam, all in one step; or the beams lose their slots.

    The first sequence of the request in policy order stands for all of them.
    """
    beams = [request.sequences[index] for index in sorted(_group_of(request).holders)]
    if draft.budget.num_left < len(beams) or not _make_room(roster, draft, request, beams):
        return
    group = _group_of(request)
    for active in beams:
        if active.sequence.index in group.joining:
            _join_again(roster, draft, active)
        new_block_ids = roster.grow(active, active.sequence.num_tokens)
        assert new_block_ids is not None, "there was room for all beams"
        draft.compute(active, 1, new_block_ids)
    group.joining.clear()
    draft.named.update((active, []) for active in request.sequences)


def _make_room(
    roster: Roster, draft: PlanDraft, request: ActiveRequest, beams: Sequence[ActiveSequence]
) -> bool:
    """Blocks for all beams are available, or it was the group's turn to be preempted."""
    num_wanted = sum(_num_blocks_wanted(roster, active) for active in beams)
    while roster.kv.num_available < num_wanted:
        if draft.is_ahead:
            draft.is_short = True
            return False
        victim = roster.running.last
        draft.preempt(roster, victim)
        if victim.request is request:
            return False
    return True


def _num_blocks_wanted(roster: Roster, active: ActiveSequence) -> int:
    sequence, kv = active.sequence, roster.kv
    num_more = max(0, kv.num_blocks_for(sequence.num_tokens) - len(sequence.block_ids))
    is_new = active.sequence.index in _group_of(active.request).joining
    return num_more + (is_new and sequence.num_computed_tokens % kv.block_size > 0)


def _join_again(roster: Roster, draft: PlanDraft, active: ActiveSequence) -> None:
    """The row leaves and joins with the tokens that the sequence took over.

    It may write to the last of its blocks only when that is its own.
    """
    sequence, kv = active.sequence, roster.kv
    assert sequence.slot is not None
    roster.slots.rejoin(sequence.slot)
    draft.join(active)
    if sequence.num_computed_tokens % kv.block_size:
        copies = kv.make_writable(sequence.block_ids, sequence.num_computed_tokens)
        assert copies is not None, "there was room for all beams"
        for copy in copies:
            sequence.block_ids[-1] = copy.target
        draft.copy(copies)
        _note_blocks(roster, active)


# ---- results ----------------------------------------------------------------------------------


def absorb_candidates(
    roster: Roster, active: ActiveSequence, candidates: Candidates, now_ns: int
) -> None:
    """What may follow one beam. With the last one's, every beam gains a token, or all is over."""
    request = active.request
    group = _group_of(request)
    roster.served(active, 1)
    if not group.take(active.sequence.index, candidates):
        return
    request.group.first_token_ns = request.group.first_token_ns or now_ns
    request.group.last_token_ns = now_ns
    forks = group.advance()
    if group.search.is_over:
        _end(roster, request)
        return
    for fork in forks:
        _take_over(roster, request, fork)
    for index in group.idle:
        _drop_blocks(roster, request.sequences[index])
    _hand_out_tokens(request)


def _take_over(roster: Roster, request: ActiveRequest, fork: Fork) -> None:
    """The target shares all blocks of the source. Before it writes to one, it copies that."""
    target, source = request.sequences[fork.target], request.sequences[fork.source].sequence
    roster.kv.share(source.block_ids)
    _drop_blocks(roster, target)
    target.sequence.block_ids = list(source.block_ids)
    target.sequence.num_computed_tokens = source.num_computed_tokens
    target.sequence.num_hashed_blocks = source.num_hashed_blocks
    _note_blocks(roster, target)


def _drop_blocks(roster: Roster, active: ActiveSequence) -> None:
    sequence = active.sequence
    roster.kv.release(sequence.block_ids)
    sequence.block_ids = []
    sequence.num_computed_tokens = 0
    sequence.num_hashed_blocks = 0
    _note_blocks(roster, active)


def _note_blocks(roster: Roster, active: ActiveSequence) -> None:
    if roster.reservations is not None:
        roster.reservations.changed(active)


def _end(roster: Roster, request: ActiveRequest) -> None:
    """The best hypotheses are the answer, in their order."""
    num_wanted = request.group.request.sampling.n
    hypotheses = _group_of(request).search.hypotheses[:num_wanted]
    if len(hypotheses) < num_wanted:
        error = InvalidParameterError(
            f"n is {num_wanted}, and what the request allows has {len(hypotheses)} answers only",
            param="n",
        )
        roster.fail_request(request, error.to_info())
        return
    wants_scores = request.group.request.sampling.logprobs is not None
    for index, (beam, _, stop) in enumerate(hypotheses):
        delta = SequenceDelta(
            index,
            beam.token_ids,
            beam.scores if wants_scores else (),
            stop.reason,
            stop.stop_token_id,
            cumulative_logprob=beam.logprob,
        )
        roster.outbox.hypothesis(request, delta)
        roster.counts.generation_tokens += len(beam.token_ids)
    for active in request.sequences:
        roster.end_sequence(active, hypotheses[0].stop.reason)


def abort_group(roster: Roster, request: ActiveRequest) -> None:
    """The request ends without an answer."""
    for index in range(request.group.request.sampling.n):
        delta = SequenceDelta(index, finish_reason=FinishReason.ABORT)
        roster.outbox.hypothesis(request, delta)
    for active in reversed(request.sequences):
        roster.end_sequence(active, FinishReason.ABORT)


def _group_of(request: ActiveRequest) -> BeamGroup:
    assert request.beams is not None, "the request does not search"
    return request.beams
