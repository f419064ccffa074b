"""Lengthens the decode rows of a plan by guesses, with what nobody else needs."""

from loraplex.core.plan import BlockId
from loraplex.core.sampling_params import SamplingParams
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.draft import PlanDraft
from loraplex.scheduling.drafting import Drafter
from loraplex.scheduling.roster import Roster
from loraplex.scheduling.settings import SchedulerSettings


def new_drafter(sampling: SamplingParams, settings: SchedulerSettings) -> Drafter | None:
    """For one sequence; None if nothing can be guessed."""
    num_draft_tokens = settings.num_draft_tokens
    if sampling.num_draft_tokens is not None:
        num_draft_tokens = sampling.num_draft_tokens
    # Every candidate of a beam is looked at: a guess would save nothing.
    if sampling.beam is not None or not (num_draft_tokens or sampling.grammar is not None):
        return None
    return Drafter(num_draft_tokens, settings.max_draft_ngram)


def add_drafts(roster: Roster, draft: PlanDraft) -> None:
    """Call it when all rows are planned.

    So a guess takes no budget that another row could use, and nobody is preempted for one. It takes
    a block only while one stays available for every running sequence.
    """
    for index, active in enumerate(draft.sequences):
        if not draft.budget.num_left:
            return
        row = draft.row(index)
        if active.drafter is None or row.token_ids is not None or row.num_tokens != 1:
            continue
        sequence = active.sequence
        # The step itself gives one more token: it needs no guess.
        num_left = active.request.stop_rules.max_tokens - sequence.num_output_tokens - 1
        # With a window, the blocks of a row are counted by how much it may compute in one step.
        num_left = min(num_left, draft.budget.num_left, draft.budget.max_per_row - 1)
        token_ids = active.drafter.propose(sequence.token_ids, num_left)
        if token_ids:
            num_fitting, new_block_ids = _make_room(roster, active, len(token_ids))
            if num_fitting:
                draft.add_drafts(index, token_ids[:num_fitting], new_block_ids)


def _make_room(
    roster: Roster, active: ActiveSequence, num_drafts: int
) -> tuple[int, list[BlockId]]:
    """How many of the guesses have room in the sequence's blocks, and the blocks it took."""
    sequence, kv = active.sequence, roster.kv
    num_missing = kv.num_blocks_for(sequence.num_tokens + num_drafts) - len(sequence.block_ids)
    num_spare = kv.num_available - len(roster.running)
    new_block_ids: list[BlockId] = []
    if num_missing > 0 and num_spare > 0:
        num_blocks = len(sequence.block_ids) + min(num_missing, num_spare)
        new_block_ids = roster.grow(active, num_blocks * kv.block_size) or []
    room = len(sequence.block_ids) * kv.block_size - sequence.num_tokens
    return min(num_drafts, room), new_block_ids
