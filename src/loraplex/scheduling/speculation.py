"""Speculative decoding: decoding rows are lengthened by draft tokens."""

from loraplex.memory.block_tables import NewBlocks
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.request import Sequence
from loraplex.scheduling.state import SchedulerState

MAX_INDEXED_TOKENS = 1024
"""Tokens that one plan indexes at most, over all sequences: about a millisecond."""


def needed_share(num_tokens: int, num_balanced_tokens: int) -> float:
    """Return the share of draft tokens that must be accepted for drafts to gain time in a step.

    A step of n tokens takes about c + n, in units of the time that a token's arithmetic takes; c
    is Capacity.num_balanced_tokens. A draft token adds 1 to that time and, if it is accepted, saves
    the time that the step takes for each of its tokens, (c + n) / n. 0.0 if c is not known.
    """
    return num_tokens / (num_tokens + num_balanced_tokens) if num_balanced_tokens else 0.0


def add_draft_tokens(state: SchedulerState, builder: PlanBuilder, num_balanced_tokens: int) -> None:
    """Lengthen decoding rows by draft tokens, after all rows are planned.

    So a draft token takes no budget that another row could use, and causes no preemption. It takes
    a block only while one stays available for every running sequence.

    A plan indexes a limited number of tokens. Prompts are indexed while they are computed, the
    rows in their order; a sequence that is not indexed whole has no draft tokens yet.
    """
    share = needed_share(builder.budget.num_spent, num_balanced_tokens)
    num_to_index = MAX_INDEXED_TOKENS
    for index, sequence in enumerate(builder.sequences):
        if sequence.drafter is None:
            continue
        num_to_index -= sequence.drafter.index(sequence.token_ids, num_to_index, share)
        row = builder.row(index)
        if not builder.budget.num_left or row.token_ids is not None or row.num_tokens != 1:
            continue
        # The step itself adds one more token: it needs no draft.
        num_left = sequence.request.stop_rules.max_tokens - sequence.num_output_tokens - 1
        # With a window, the blocks of a row are counted by how much it may compute in one step.
        num_left = min(num_left, builder.budget.num_left, builder.budget.max_per_row - 1)
        if sequence.num_tokens_to_border is not None:
            num_left = min(num_left, sequence.num_tokens_to_border)
        token_ids = sequence.drafter.propose(sequence.token_ids, num_left, share)
        if token_ids:
            num_fitting, new_block_ids = _take_blocks(state, sequence, len(token_ids))
            if num_fitting:
                builder.add_draft_tokens(index, token_ids[:num_fitting], new_block_ids)


def _take_blocks(
    state: SchedulerState, sequence: Sequence, num_draft_tokens: int
) -> tuple[int, NewBlocks]:
    """Return how many draft tokens fit in the sequence's blocks, and the blocks it took."""
    num_fitting = state.kv.num_fitting(
        sequence.block_tables,
        sequence.num_tokens + num_draft_tokens,
        num_to_leave=len(state.running),
    )
    new_block_ids = state.grow(sequence, num_fitting)
    assert new_block_ids is not None, "there were spare blocks"
    return min(num_draft_tokens, num_fitting - sequence.num_tokens), new_block_ids
