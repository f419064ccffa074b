"""Sequences as they will be after the in-flight step, so that the next one can be planned.

A row that is planned ahead continues from a token that only the runner knows, by the time that it
computes the row. So only sequences whose next input is certain take part.
"""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence

from loraplex.core.plan import RowStep
from loraplex.scheduling.request import Sequence

UNKNOWN_TOKEN = -1
"""Placeholder of the token that an in-flight row will sample."""


@contextlib.contextmanager
def projected(
    rows: AbstractSequence[RowStep], sequences: AbstractSequence[Sequence]
) -> Iterator[None]:
    """Treat these rows as computed while a plan is made.

    Sequences whose state afterwards is not certain await their results.
    """
    moved: list[tuple[RowStep, Sequence]] = []
    waiting: list[Sequence] = []
    for row, sequence in zip(rows, sequences, strict=True):
        if sequence.is_finished:
            continue
        if sequence.request.can_project(sequence, row):
            moved.append((row, sequence))
        else:
            waiting.extend(sequence.request.scheduled_with(sequence))
    for row, sequence in moved:
        sequence.num_computed_tokens += row.num_tokens
        if sequence.num_uncomputed_tokens == 0:
            sequence.token_ids.append(UNKNOWN_TOKEN)
    for sequence in waiting:
        sequence.awaits_result = True
    try:
        yield
    finally:
        for sequence in waiting:
            sequence.awaits_result = False
        for row, sequence in moved:
            sequence.num_computed_tokens -= row.num_tokens
            if sequence.token_ids[-1] == UNKNOWN_TOKEN:
                sequence.token_ids.pop()
