"""What is done to the logits of the positions to be sampled, in this order.

1. logit_bias (transformers' sequence_bias of single tokens)
2. repetition_penalty, then presence and frequency penalty
3. no_repeat_ngram_size, bad_token_ids, and end and stop tokens before min_tokens
4. allowed_token_ids and the grammar (transformers' prefix_allowed_tokens_fn)

and then, in Kernels.draw_tokens: top-k, temperature, top-p, min-p. It is the order of transformers'
processors, where it has them (temperature changes no top-k). Each of the four touches all rows
that need it by few calls. The changes are taken back: rows are sampled where they lie, not copied.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import RowAdded, RowStep, Slot
from loraplex.execution.sampling.row_rules import penalized
from loraplex.execution.sampling.rows import Draw
from loraplex.kernels.ops import Kernels


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


IntArray = npt.NDArray[np.int64]
Where = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LogitsEdits:
    """Edits of logits; leaving the context restores the logits."""

    def __init__(self, logits: torch.Tensor, kernels: Kernels) -> None:
        """logits [rows, vocab] float32"""
        self._logits = logits
        self._kernels = kernels
        self._undo: list[tuple[Where, torch.Tensor]] = []

    def __enter__(self) -> "LogitsEdits":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for where, before in reversed(self._undo):
            self._logits[where] = before

    def open(self, rows: IntArray, token_ids: IntArray) -> "OpenLogits":
        """The logits at (rows[i], token_ids[i]), to be read and then set."""
        where = self.tensor(rows), self.tensor(token_ids)
        before = self._logits[where]
        self._undo.append((where, before))
        return OpenLogits(self._logits, where, before)

    def mask(self, rows: IntArray, bitmask: npt.NDArray[np.int32]) -> None:
        """-inf in these rows where the bit is 0; bitmask [len(rows), ceil(vocab / 32)]."""
        where = self.tensor(rows)
        self._undo.append((where, self._logits.index_select(0, where)))
        self._kernels.apply_bitmask(self._logits, rows, self.tensor(bitmask))

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Tensor of the values on the device of the logits."""
        return torch.from_numpy(values).to(self._logits.device)


class OpenLogits:
    """Some logits: their values, and where they lie."""

    def __init__(
        self, logits: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor
    ) -> None:
        self._logits = logits
        self._where = where
        self.values = values

    def set(self, values: torch.Tensor | float) -> None:
        if isinstance(values, float):
            values = torch.full_like(self.values, values)
        self._logits[self._where] = values


Bitmask = npt.NDArray[np.int32]


class LogitsProcessors:
    def __init__(self, grammars: RowGrammars | None) -> None:
        self._grammars = grammars

    def apply(self, edits: LogitsEdits, draws: Sequence[Draw]) -> list[int]:
        """Returns which draws' logits may have changed, ascending."""
        changed = {
            *_add_bias(edits, draws),
            *_penalize(edits, draws),
            *_ban(edits, draws),
            *self._mask(edits, draws),
        }
        return sorted(changed)

    def _mask(self, edits: LogitsEdits, draws: Sequence[Draw]) -> list[int]:
        masks: dict[int, Bitmask] = {
            index: draw.row.rules.allowed
            for index, draw in enumerate(draws)
            if draw.row.rules is not None and draw.row.rules.allowed is not None
        }
        if self._grammars is not None:
            which = [i for i, draw in enumerate(draws) if draw.row.sampling.grammar is not None]
            if which:
                positions = [(draws[i].row.added.slot, draws[i].accepted) for i in which]
                for index, mask in zip(which, self._grammars.bitmasks(positions), strict=True):
                    masks[index] = masks[index] & mask if index in masks else mask
        if masks:
            edits.mask(_rows_of(draws, masks), np.stack(list(masks.values())))
        return list(masks)


def _add_bias(edits: LogitsEdits, draws: Sequence[Draw]) -> list[int]:
    """Add biases; return the draws that have one. The other processors do the same."""
    biases = {
        index: draw.row.rules.bias
        for index, draw in enumerate(draws)
        if draw.row.rules is not None and draw.row.rules.bias is not None
    }
    if biases:
        token_ids, values = zip(*biases.values(), strict=True)
        rows = np.repeat(_rows_of(draws, biases), [len(ids) for ids in token_ids])
        opened = edits.open(rows, np.concatenate(token_ids))
        opened.set(opened.values + edits.tensor(np.concatenate(values)))
    return list(biases)


def _penalize(edits: LogitsEdits, draws: Sequence[Draw]) -> list[int]:
    seen = {
        index: draw.row.rules.counts.seen(draw.accepted)
        for index, draw in enumerate(draws)
        if draw.row.rules is not None and draw.row.rules.counts is not None
    }
    if seen:
        of_rows = list(seen.values())
        rows = np.repeat(_rows_of(draws, seen), [len(tokens.token_ids) for tokens in of_rows])
        opened = edits.open(rows, np.concatenate([tokens.token_ids for tokens in of_rows]))
        params = [draws[index].row.sampling for index in seen]
        opened.set(penalized(opened.values, of_rows, params))
    return list(seen)


def _ban(edits: LogitsEdits, draws: Sequence[Draw]) -> list[int]:
    banned = {
        index: token_ids
        for index, draw in enumerate(draws)
        if draw.row.rules is not None and (token_ids := draw.row.rules.banned(draw.accepted))
    }
    if banned:
        rows = np.repeat(_rows_of(draws, banned), [len(ids) for ids in banned.values()])
        columns = np.array([i for ids in banned.values() for i in ids], dtype=np.int64)
        edits.open(rows, columns).set(-torch.inf)
    return list(banned)


def _rows_of(draws: Sequence[Draw], indices: Iterable[int]) -> IntArray:
    return np.array([draws[index].logits_row for index in indices], dtype=np.int64)
