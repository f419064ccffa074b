"""How the rows that compute prompts share what the decoding rows leave of a step."""

import dataclasses
import itertools

from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.budget import StepBudget
from loraplex.scheduling.policy import OrderKey


@dataclasses.dataclass(slots=True)
class _Row:
    active: ActiveSequence
    num_uncomputed: int
    num_wanted: int
    """In this step at most."""
    is_new: bool

    @property
    def length_key(self) -> tuple[int, int, OrderKey]:
        """The shortest first, among those of one priority."""
        key = self.active.key
        return (key[0], self.num_uncomputed, key)


class PrefillSplit:
    """Splits the token budget of one step between prefilling rows; all of it is used.

    The first row in policy order may take `1 - shortest_share` of the budget; what it leaves goes
    to the row with the fewest tokens left, then to the next (by priority first). A row that has
    just taken its slot computes one token at least.

    So a prompt of S tokens, the shortest of its priority, is computed within
    ceil(S / int(shortest_share * B))
    steps of B tokens, however long the others are; and the first in order is never held up, so
    the longest prompt ends, too. Prompts of equal length are computed one after the other, which
    is better for all of them than side by side.
    """

    def __init__(
        self, budget: StepBudget, shortest_share: float, *, seats_all: bool = False
    ) -> None:
        """seats_all: who waits need not have more than one token in the step to take a slot."""
        self._num_tokens = budget.num_left
        self._max_per_row = budget.max_per_row
        self._num_of_first = budget.num_left - int(shortest_share * budget.num_left)
        self._seats_all = seats_all
        self._rows: list[_Row] = []
        self._num_new = 0
        self._num_wanted = 0

    def add(self, active: ActiveSequence, *, is_new: bool) -> None:
        """A row that has more than its newest token to compute, or has just taken its slot."""
        row = self._row(active, active.num_computable_tokens, is_new=is_new)
        self._rows.append(row)
        self._num_new += is_new
        self._num_wanted += row.num_wanted

    def has_room_for(self, active: ActiveSequence) -> bool:
        """Would a sequence that waits get a token, if it took a slot now?"""
        if self._num_new >= self._num_tokens:
            return False
        if self._seats_all or self._num_wanted < self._num_tokens:
            return True
        row = self._row(active, active.sequence.num_tokens, is_new=False)
        return self._grants([*self._rows, row])[-1] > 0

    def grants(self) -> list[tuple[ActiveSequence, int]]:
        """Rows and how many tokens each computes, in policy order; none for some."""
        grants = zip(self._rows, self._grants(self._rows), strict=True)
        rows = [(row.active, num_tokens) for row, num_tokens in grants if num_tokens]
        return sorted(rows, key=lambda row: row[0].key)

    def _row(self, active: ActiveSequence, num_uncomputed: int, *, is_new: bool) -> _Row:
        return _Row(active, num_uncomputed, min(num_uncomputed, self._max_per_row), is_new)

    def _grants(self, rows: list[_Row]) -> list[int]:
        grants = [int(row.is_new) for row in rows]
        num_left = self._num_tokens - sum(grants)
        if not rows or not num_left:
            return grants
        first = min(range(len(rows)), key=lambda index: rows[index].active.key)
        by_length = sorted(range(len(rows)), key=lambda index: rows[index].length_key)
        limits = itertools.chain([self._num_of_first], itertools.repeat(self._num_tokens))
        for index, limit in zip([first, *by_length], limits, strict=False):
            num_more = min(rows[index].num_wanted - grants[index], num_left, limit)
            grants[index] += num_more
            num_left -= num_more
        return grants
