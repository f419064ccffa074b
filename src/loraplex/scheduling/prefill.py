"""Division of a step's remaining tokens between the rows that compute prompts."""

import dataclasses
import itertools

from loraplex.scheduling.plan_builder import StepBudget
from loraplex.scheduling.pool_request import PoolRequest
from loraplex.scheduling.request import OrderKey, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class SpanClaim:
    """The first row in scheduling order is at a whole span that did not fit into the last step."""

    sequence: Sequence
    num_tokens: int
    """Tokens that a step must have for it."""

    def yields(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Return whether a decoding sequence is left out of the step so that the span fits."""
        num_left = budget.num_left
        if sequence.key < self.sequence.key or self.num_tokens > num_left:
            return False
        return num_left - sequence.request.num_slots < self.num_tokens


@dataclasses.dataclass(slots=True)
class _Row:
    sequence: Sequence
    input_to_encode: int
    """Tokens of the encoder's input: a span with the next token, and part of the counts below."""
    num_uncomputed: int
    num_wanted: int
    """Maximum number of tokens in this step."""
    num_least: int
    """Minimum number of tokens, if it gets any."""
    is_new: bool

    @property
    def is_pooled(self) -> bool:
        return isinstance(self.sequence.request, PoolRequest)

    @property
    def length_key(self) -> tuple[int, int, OrderKey]:
        """Sort key: by priority, then the shortest first."""
        key = self.sequence.key
        return (key[0], self.num_uncomputed, key)

    def num_computed(self, num_tokens: int) -> int:
        """Return how many positions of the sequence it computes of so many tokens of a step."""
        num_wanted = self.num_wanted - self.input_to_encode
        return self.sequence.num_fitting_tokens(num_wanted, num_tokens - self.input_to_encode)

    def fitting(self, num_tokens: int) -> int:
        """Return how many of so many tokens of a step it takes, with those of images to encode."""
        sequence = self.sequence
        if sequence.slot is None:  # not known where it begins
            return min(self.num_wanted, num_tokens) if num_tokens >= self.num_least else 0
        num_computed = self.num_computed(num_tokens) if num_tokens > self.input_to_encode else 0
        if not num_computed:
            return 0
        return self.input_to_encode + num_computed + sequence.num_to_encode(num_computed)


class PrefillSplit:
    """Splits the token budget of one step between prefilling rows, which take all that they can.

    The first row in scheduling order may take `1 - shortest_share` of the budget. What it leaves
    goes to the row with the fewest tokens left, then to the next (by priority first). A row that
    has just taken its slot computes at least one token.

    So a prompt of S tokens, the shortest of its priority, is computed within
    ceil(S / int(shortest_share * B)) steps of B tokens, however long the others are. The first row
    is never held up, so the longest prompt ends, too. Prompts of equal length are computed one
    after the other, which is better for all of them than side by side.

    A whole span gets all of its tokens or none, whatever the maximum of a row. The first row gets
    it whatever its share, and claims the next step if this one is too small: then later rows that
    decode are left out of it. A row is the first once those before it have ended.

    Next to rows that decode, pooled prompts share `max_pooled` tokens in the same way. A span that
    is longer is computed in a step without other pooled rows.
    """

    def __init__(
        self,
        budget: StepBudget,
        shortest_share: float,
        *,
        admits_all: bool = False,
        claim: SpanClaim | None = None,
        max_pooled: int | None = None,
    ) -> None:
        """admits_all: a waiting sequence may take a slot even if it gets only one token.

        claim: that of the last step. max_pooled: tokens of pooled prompts together; None: all.
        """
        self._num_tokens = budget.num_left
        self._max_pooled = budget.num_left if max_pooled is None else max_pooled
        self._max_per_row = budget.max_per_row
        self._shortest_share = shortest_share
        self._admits_all = admits_all
        self._claim = claim
        self._rows: list[_Row] = []
        self._num_new = 0
        """Tokens that the new rows take at least."""
        self._num_new_pooled = 0
        """Those of pooled prompts."""
        self._num_wanted = 0
        self._refused: list[_Row] = []
        """Waiting sequences with a span, for which there are too few tokens."""

    def add(self, sequence: Sequence, *, is_new: bool) -> None:
        """Add a row that has more than its newest token to compute, or has just taken its slot."""
        row = self._row(sequence, sequence.num_computable_tokens, is_new=is_new)
        self._rows.append(row)
        self._num_wanted += max(row.num_wanted, row.num_least)
        if is_new:
            self._num_new += row.num_least
            self._num_new_pooled += row.num_least * row.is_pooled
            if self._claim is not None and self._claim.sequence is sequence:
                self._claim = None

    def has_tokens_for(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence would get a token if it took a slot now."""
        row = self._row(sequence, sequence.num_tokens, is_new=False)
        if self._has_tokens_for(row):
            return True
        if row.num_least > 1:
            self._refused.append(row)
        return False

    def grants(self) -> list[tuple[Sequence, int]]:
        """Return the rows that get tokens and how many they compute, in scheduling order."""
        grants = zip(self._rows, self._grants(self._rows), strict=True)
        rows = [
            (row.sequence, row.num_computed(num_tokens)) for row, num_tokens in grants if num_tokens
        ]
        return sorted(rows, key=lambda row: row[0].key)

    def next_claim(self) -> SpanClaim | None:
        """Return what the next step must have tokens for."""
        if not self._refused and all(row.num_least == 1 for row in self._rows):
            return None
        grants = [*self._grants(self._rows), *([0] * len(self._refused))]
        pairs = zip([*self._rows, *self._refused], grants, strict=True)
        first, num_tokens = min(pairs, key=lambda pair: pair[0].sequence.key)
        if num_tokens or first.num_least == 1:
            return None
        return SpanClaim(first.sequence, first.num_least)

    def _row(self, sequence: Sequence, num_uncomputed: int, *, is_new: bool) -> _Row:
        input_to_encode = sequence.input_to_encode
        if sequence.slot is None:
            input_to_encode = sequence.request.num_to_encode_if_admitted(sequence)
        return _Row(
            sequence,
            input_to_encode,
            input_to_encode + num_uncomputed,
            input_to_encode + min(num_uncomputed, self._max_per_row),
            input_to_encode + sequence.num_least_tokens,
            is_new,
        )

    def _has_tokens_for(self, row: _Row) -> bool:
        num_claimed = 0
        if self._claim is not None and self._claim.sequence is not row.sequence:
            num_claimed = self._claim.num_tokens
        if self._num_new + num_claimed + row.num_least > self._num_tokens:
            return False
        is_limited = row.is_pooled and self._max_pooled < self._num_tokens
        num_pooled = self._num_new_pooled
        if is_limited and num_pooled and num_pooled + row.num_least > self._max_pooled:
            return False
        if self._admits_all:
            return True
        if not is_limited and self._num_wanted + row.num_least <= self._num_tokens:
            return True
        return self._grants([*self._rows, row])[-1] > 0

    def _grants(self, rows: list[_Row]) -> list[int]:
        grants = [row.num_least if row.is_new else 0 for row in rows]
        num_left = self._num_tokens - sum(grants)
        if not rows or not num_left:
            return grants
        num_pooled = sum(grants[index] for index, row in enumerate(rows) if row.is_pooled)
        first = min(range(len(rows)), key=lambda index: rows[index].sequence.key)
        by_length = sorted(range(len(rows)), key=lambda index: rows[index].length_key)
        shared = self._max_pooled if rows[first].is_pooled else self._num_tokens
        of_first = shared - int(self._shortest_share * shared)
        of_first = max(of_first, rows[first].num_least - grants[first])
        limits = itertools.chain([of_first], itertools.repeat(self._num_tokens))
        for index, limit in zip([first, *by_length], limits, strict=False):
            row = rows[index]
            if row.is_pooled:
                least = 0 if num_pooled else row.num_least
                limit = min(limit, max(self._max_pooled - num_pooled, least))
            num_tokens = row.fitting(grants[index] + max(0, min(num_left, limit)))
            num_more = max(0, num_tokens - grants[index])
            grants[index] += num_more
            num_left -= num_more
            num_pooled += num_more * row.is_pooled
        return grants
