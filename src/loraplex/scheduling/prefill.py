"""Division of a step's remaining tokens between the rows that compute prompts."""

import dataclasses
import itertools

from loraplex.scheduling.plan_builder import StepBudget
from loraplex.scheduling.request import OrderKey, Sequence


@dataclasses.dataclass(slots=True)
class _Row:
    sequence: Sequence
    num_uncomputed: int
    num_wanted: int
    """Maximum number of tokens in this step."""
    is_new: bool

    @property
    def length_key(self) -> tuple[int, int, OrderKey]:
        """Sort key: by priority, then the shortest first."""
        key = self.sequence.key
        return (key[0], self.num_uncomputed, key)


class PrefillSplit:
    """Splits the token budget of one step between prefilling rows; all of it is used.

    The first row in scheduling order may take `1 - shortest_share` of the budget. What it leaves
    goes to the row with the fewest tokens left, then to the next (by priority first). A row that
    has just taken its slot computes at least one token.

    So a prompt of S tokens, the shortest of its priority, is computed within
    ceil(S / int(shortest_share * B)) steps of B tokens, however long the others are. The first row
    is never held up, so the longest prompt ends, too. Prompts of equal length are computed one
    after the other, which is better for all of them than side by side.
    """

    def __init__(
        self, budget: StepBudget, shortest_share: float, *, admits_all: bool = False
    ) -> None:
        """admits_all: a waiting sequence may take a slot even if it gets only one token."""
        self._num_tokens = budget.num_left
        self._max_per_row = budget.max_per_row
        self._num_of_first = budget.num_left - int(shortest_share * budget.num_left)
        self._admits_all = admits_all
        self._rows: list[_Row] = []
        self._num_new = 0
        self._num_wanted = 0

    def add(self, sequence: Sequence, *, is_new: bool) -> None:
        """Add a row that has more than its newest token to compute, or has just taken its slot."""
        row = self._row(sequence, sequence.num_computable_tokens, is_new=is_new)
        self._rows.append(row)
        self._num_new += is_new
        self._num_wanted += row.num_wanted

    def has_tokens_for(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence would get a token if it took a slot now."""
        if self._num_new >= self._num_tokens:
            return False
        if self._admits_all or self._num_wanted < self._num_tokens:
            return True
        row = self._row(sequence, sequence.num_tokens, is_new=False)
        return self._grants([*self._rows, row])[-1] > 0

    def grants(self) -> list[tuple[Sequence, int]]:
        """Return the rows that get tokens and how many, in scheduling order."""
        grants = zip(self._rows, self._grants(self._rows), strict=True)
        rows = [(row.sequence, num_tokens) for row, num_tokens in grants if num_tokens]
        return sorted(rows, key=lambda row: row[0].key)

    def _row(self, sequence: Sequence, num_uncomputed: int, *, is_new: bool) -> _Row:
        return _Row(sequence, num_uncomputed, min(num_uncomputed, self._max_per_row), is_new)

    def _grants(self, rows: list[_Row]) -> list[int]:
        grants = [int(row.is_new) for row in rows]
        num_left = self._num_tokens - sum(grants)
        if not rows or not num_left:
            return grants
        first = min(range(len(rows)), key=lambda index: rows[index].sequence.key)
        by_length = sorted(range(len(rows)), key=lambda index: rows[index].length_key)
        limits = itertools.chain([self._num_of_first], itertools.repeat(self._num_tokens))
        for index, limit in zip([first, *by_length], limits, strict=False):
            num_more = min(rows[index].num_wanted - grants[index], num_left, limit)
            grants[index] += num_more
            num_left -= num_more
        return grants
