"""Selection of the newest steps of a model from those that are kept."""

import itertools
from collections.abc import Sequence

from loraplex.core.stats import StepRecord


def select_steps(
    records: Sequence[StepRecord], limit: int, after_ns: int | None = None
) -> Sequence[StepRecord]:
    """Return the newest records, oldest first; with after_ns the first ones that started later.

    A new engine begins with step 1 again, but its steps start later than those of the last one.
    """
    if after_ns is None:
        return list(itertools.islice(records, max(0, len(records) - limit), None))
    # A poll that follows the engine looks at the new records only.
    later = itertools.takewhile(lambda one: one.start_ns > after_ns, reversed(records))
    num_later = sum(1 for _ in later)
    first = len(records) - num_later
    return list(itertools.islice(records, first, first + min(num_later, limit)))
