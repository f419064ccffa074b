"""Sequences as they will be after the plans in flight, so that the next plan can be made.

Which sequences take part in it: those whose next input is certain and, where a pipeline computes
several plans at a time, only so many that the other plans get their share.
"""

import contextlib
from collections.abc import Iterator

from loraplex.core.plan import RowStep
from loraplex.scheduling.pending_steps import PendingSteps
from loraplex.scheduling.request import Sequence
from loraplex.scheduling.running import RunningSet

UNKNOWN_TOKEN = -1
"""Placeholder of the token that an in-flight row will sample."""


@contextlib.contextmanager
def projected(steps: PendingSteps, running: RunningSet) -> Iterator[None]:
    """Treat the rows in flight as computed while a plan is made, and leave sequences out of it.

    A runner without a pipeline knows the token that a row has sampled by the time that it computes
    the next row. The first stage of a pipeline does not: only prompts continue there.
    """
    moved, left_out = _divided(steps)
    for row, sequence in moved:
        sequence.num_computed_tokens += row.num_tokens
        if sequence.num_uncomputed_tokens == 0:
            sequence.token_ids.append(UNKNOWN_TOKEN)
    for sequence in left_out:
        sequence.is_left_out = True
    if steps.is_pipelined:
        left_out += _leave_to_others(steps, running)
    try:
        yield
    finally:
        for sequence in left_out:
            sequence.is_left_out = False
        for row, sequence in moved:
            sequence.num_computed_tokens -= row.num_tokens
            if sequence.token_ids[-1] == UNKNOWN_TOKEN:
                sequence.token_ids.pop()


def _divided(steps: PendingSteps) -> tuple[list[tuple[RowStep, Sequence]], list[Sequence]]:
    """Return the rows in flight that can be projected, and the sequences of the others."""
    moved: list[tuple[RowStep, Sequence]] = []
    others: list[Sequence] = []
    for row, sequence in steps.rows():
        if sequence.is_finished:
            continue
        samples = row.start + row.num_tokens >= sequence.num_tokens
        if sequence.request.can_project(sequence, row) and not (samples and steps.is_pipelined):
            moved.append((row, sequence))
        else:
            others.extend(sequence.request.scheduled_with(sequence))
    return moved, others


def _leave_to_others(steps: PendingSteps, running: RunningSet) -> list[Sequence]:
    """Leave out the decoding sequences beyond this plan's share, and return them.

    The sequences that could be computed now are divided between the plans that could be launched
    now, and no plan gets more than its part of all that run. A sequence that is left out is in one
    of the next `max_steps` plans: if all of these were full, they would hold all that run.
    """
    ready = [sequence for sequence in running if sequence.is_decoding]
    num_free = steps.max_steps - len(steps)
    share = min(-(-len(ready) // num_free), -(-len(running) // steps.max_steps))
    left_out = [other for one in ready[share:] for other in one.request.scheduled_with(one)]
    for sequence in left_out:
        sequence.is_left_out = True
    return left_out
