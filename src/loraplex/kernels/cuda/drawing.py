"""Draws on a GPU: those of kernels.sampling, given the token weights.

The weights are the device's own: its exp has other last bits than torch's, so now and then another
token than the reference's comes. All the rest is exact.
"""

import dataclasses

import numpy as np
import torch
import triton

from loraplex.kernels.cuda.logit_rows import (
    BLOCK,
    MAX_SPLITS,
    Splits,
    extremes,
    sent_together,
)
from loraplex.kernels.cuda.programs import cuts, draws
from loraplex.kernels.sampling import DrawOptions, IntArray

_LEVELS = 16
_TALLY_BLOCK = 128
_TALLY_WARPS = 4
"""So that each thread keeps 16 sums, in registers."""
_CAPACITY = 8192
"""Logits of a row that are listed. Where the cut is among more, it is looked for in all."""


def draw_tokens(logits: torch.Tensor, rows: IntArray, options: DrawOptions) -> torch.Tensor:
    """Token ids [n] int64 of logits [any, vocab] float32; as Kernels.draw_tokens.

    Given the weights of the tokens, which need not have the bits of the reference's. A row that
    breaks the rules (NaN, no finite maximum) gets some token. Nothing waits for the device.
    """
    draw = _Draw(logits, rows, options)
    vocab_size = logits.shape[1]
    if np.any((options.top_k > 0) & (options.top_k < vocab_size)):
        draw.cut(is_weighted=False)
    if np.any(options.top_p < 1.0):
        draw.cut(is_weighted=True)
    return draw.token_ids()


def token_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Weights as in kernels.sampling.token_weights, by the device's exp: what draw_tokens uses.

    logits [n, vocab] float32, temperature [n] float32; int64 [n, vocab].
    """
    num_rows, vocab_size = logits.shape
    splits = Splits(vocab_size)
    maxima, _ = extremes(logits, None, num_rows)
    weights = torch.empty(logits.shape, dtype=torch.int64, device=logits.device)
    cuts.store_weights[num_rows, triton.cdiv(vocab_size, BLOCK)](
        *(weights, logits, temperature, maxima, logits.stride(0)),
        VOCAB=vocab_size,
        NUM_SPLITS=splits.number,
        MAX_SPLITS=MAX_SPLITS,
        BLOCK=BLOCK,
    )
    return weights


@dataclasses.dataclass(slots=True)
class _Parameters:
    """Parameters on the device, each [n]; float64 except the rows."""

    rows: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor


class _Draw:
    """One call of draw_tokens, and what its launches leave to one another."""

    def __init__(self, logits: torch.Tensor, rows: IntArray, options: DrawOptions) -> None:
        device, num_rows = logits.device, len(rows)
        self._logits = logits
        self._splits = Splits(logits.shape[1])
        self._shape = num_rows, self._splits.number
        self._parameters = _sent(rows, options, logits)
        self._maxima, self._minima = extremes(logits, self._parameters.rows, num_rows)
        self._limits = torch.full((num_rows,), -torch.inf, device=device)
        self._least_weights = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_ties = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def cut(self, *, is_weighted: bool) -> None:
        """Cut by top-p, or else by top-k; only rows that have it set."""
        num_rows, _ = self._shape
        logits, device, given = self._logits, self._logits.device, self._parameters
        levels = torch.empty((num_rows, _LEVELS), dtype=torch.int64, device=device)
        masses = torch.empty((*self._shape, _LEVELS), dtype=torch.int64, device=device)
        counts = torch.empty((*self._shape, _LEVELS), dtype=torch.int32, device=device)
        listed = torch.empty((num_rows, _CAPACITY), device=device)
        bounds = given.top_p if is_weighted else given.top_k
        row_parameters = (logits, given.rows, bounds, given.temperature)
        constants = {
            "VOCAB": self._splits.vocab_size,
            "NUM_SPLITS": self._splits.number,
            "MAX_SPLITS": MAX_SPLITS,
            "LEVELS": _LEVELS,
            "IS_WEIGHTED": is_weighted,
        }
        cuts.tally[self._shape](
            *(levels, masses, counts, *row_parameters),
            *(self._limits, self._maxima, self._minima, logits.stride(0)),
            SPLIT=self._splits.size,
            BLOCK=_TALLY_BLOCK,
            num_warps=_TALLY_WARPS,
            **constants,
        )
        cuts.gather[self._shape](
            *(listed, levels, masses, counts, *row_parameters),
            *(self._limits, self._maxima, logits.stride(0)),
            SPLIT=self._splits.size,
            CAPACITY=_CAPACITY,
            BLOCK=BLOCK,
            **constants,
        )
        cuts.cut[(num_rows,)](
            *(self._limits, self._least_weights, self._num_ties),
            *(listed, levels, masses, counts, *row_parameters, self._maxima, logits.stride(0)),
            CAPACITY=_CAPACITY,
            BLOCK=BLOCK,
            **constants,
        )

    def token_ids(self) -> torch.Tensor:
        """[n] int64, by what the cuts left."""
        num_rows, _ = self._shape
        logits, given = self._logits, self._parameters
        sums = torch.empty(self._shape, dtype=torch.int64, device=logits.device)
        ties, drawn = torch.empty_like(sums), torch.empty_like(self._num_ties)
        constants = {
            "VOCAB": self._splits.vocab_size,
            "SPLIT": self._splits.size,
            "NUM_SPLITS": self._splits.number,
            "MAX_SPLITS": MAX_SPLITS,
            "BLOCK": BLOCK,
        }
        draws.sum_splits[self._shape](
            *(sums, ties, logits, given.rows, given.temperature, given.min_p),
            *(self._limits, self._least_weights, self._maxima, logits.stride(0)),
            **constants,
        )
        draws.draw[(num_rows,)](
            *(drawn, sums, ties, logits, given.rows),
            *(given.temperature, given.min_p, given.uniforms),
            *(self._limits, self._least_weights, self._num_ties, self._maxima, logits.stride(0)),
            **constants,
        )
        return drawn


def _sent(rows: IntArray, options: DrawOptions, logits: torch.Tensor) -> _Parameters:
    """Send the parameters in one transfer. A top-k of the whole vocabulary is none."""
    top_k = np.where(options.top_k < logits.shape[1], options.top_k, 0)
    numbers = (top_k, options.temperature, options.top_p, options.min_p, options.uniforms)
    arrays = [array.astype(np.float64, copy=False) for array in numbers]
    return _Parameters(*sent_together([rows, *arrays], logits.device))
