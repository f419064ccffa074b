"""Sequences as they will be, once the plan in flight has landed: so the next one can be made.

A row of a plan that is made ahead goes on from a token that nobody knows yet: the runner does, by
the time that it computes it. So only sequences take part whose next input is certain.
"""

import contextlib
from collections.abc import Iterator, Sequence

from loraplex.core.plan import RowStep
from loraplex.scheduling.active import ActiveSequence

UNKNOWN_TOKEN = -1
"""Stands for the token that a row in flight will sample."""


@contextlib.contextmanager
def projected(rows: Sequence[RowStep], sequences: Sequence[ActiveSequence]) -> Iterator[None]:
    """While a plan is made: the sequences of these rows have computed them.

    Those of which it is not known how they will be await their results.
    """
    moved, waiting = _split(rows, sequences)
    for row, active in moved:
        active.sequence.num_computed_tokens += row.num_tokens
        if active.sequence.num_uncomputed_tokens == 0:
            active.sequence.token_ids.append(UNKNOWN_TOKEN)
    for active in waiting:
        active.awaits_result = True
    try:
        yield
    finally:
        for active in waiting:
            active.awaits_result = False
        for row, active in moved:
            active.sequence.num_computed_tokens -= row.num_tokens
            if active.sequence.token_ids[-1] == UNKNOWN_TOKEN:
                active.sequence.token_ids.pop()


def _split(
    rows: Sequence[RowStep], sequences: Sequence[ActiveSequence]
) -> tuple[list[tuple[RowStep, ActiveSequence]], list[ActiveSequence]]:
    """Those whose next input is certain, with their rows, and the others."""
    moved: list[tuple[RowStep, ActiveSequence]] = []
    waiting: list[ActiveSequence] = []
    for row, active in zip(rows, sequences, strict=True):
        if active.is_finished:
            continue
        if active.request.beams is not None:
            waiting.extend(active.request.sequences)
        elif _is_certain(active, row):
            moved.append((row, active))
        else:
            waiting.append(active)
    return moved, waiting


def _is_certain(active: ActiveSequence, row: RowStep) -> bool:
    """Will it, unless it ends, compute just the tokens that follow, one of them new?"""
    sequence = active.sequence
    if row.start + row.num_tokens < sequence.num_tokens:
        return True
    if active.request.group.request.sampling.return_logits:
        return False  # those of a row that is computed in vain would be left behind
    num_left = active.request.stop_rules.max_tokens - sequence.num_output_tokens
    return active.drafter is None and num_left > 1
