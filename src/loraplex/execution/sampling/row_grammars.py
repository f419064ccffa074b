"""What the sampler needs of its rows' grammars: masks before a token, a word with each after."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import RowAdded, RowStep, Slot


class RowGrammars(Protocol):
    """Knows the rows whose sampling has a grammar; all calls are about such rows only."""

    def add_row(self, row: RowAdded) -> None:
        """Its output so far is among its tokens."""
        ...

    def remove_row(self, slot: Slot) -> None:
        """No change if the slot is none of its own."""
        ...

    def begin(self, steps: Sequence[RowStep]) -> None:
        """Start a step: its masks may be made while it is computed."""
        ...

    def unready(self, slots: Iterable[Slot], *, has_others: bool) -> frozenset[Slot]:
        """Wait a short time for the masks of these rows; return the slots whose masks are missing.

        has_others: whether the step has further rows, which wait, too. Such a row is not sampled in
        this step, so that the others do not wait for its grammar.
        """
        ...

    def bitmasks(self, positions: Sequence[tuple[Slot, tuple[int, ...]]]) -> npt.NDArray[np.int32]:
        """What may come: [len(positions), ceil(vocab / 32)], as Kernels.apply_bitmask takes it.

        A position is a row's next token after these drafts, as if they had been accepted. A row
        whose grammar can not go on has no bit.
        """
        ...

    def problem(self, slot: Slot) -> ErrorInfo | None:
        """Why its grammar leaves no token, if it is the grammar."""
        ...

    def accept(self, slot: Slot, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The row's new tokens. Returns what the grammar makes likely to follow them.

        Tokens that come by RowStep.token_ids (a beam's) are not passed here.
        """
        ...

    def close(self) -> None: ...
