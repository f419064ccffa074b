"""What is done to the logits of the positions to be sampled, in this order.

1. logit_bias (transformers' sequence_bias of single tokens)
2. repetition_penalty, then presence and frequency penalty
3. no_repeat_ngram_size, bad_token_ids, and end and stop tokens before min_tokens
4. allowed_token_ids and the grammar (transformers' prefix_allowed_tokens_fn)

and then, in Kernels.draw_tokens: top-k, temperature, top-p, min-p. It is the order of transformers'
processors, where it has them (temperature changes no top-k). Each of the four touches all rows
that need it by few calls.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.execution.sampling.logits_edits import LogitsEdits
from loraplex.execution.sampling.penalties import penalized
from loraplex.execution.sampling.row_grammars import RowGrammars
from loraplex.execution.sampling.rows import Draw

IntArray = npt.NDArray[np.int64]
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
