"""Argmax, bitmasks, draws and log probabilities on a GPU. Nothing waits for the device.

What a row gets does not depend on the other rows: sums are integers, or are of splits of the
vocabulary that are the same for any number of rows.

Draws are those of kernels.sampling, given the token weights. The weights are the device's own: its
exp has other last bits than torch's, so now and then another token than the reference's comes. All
the rest is exact.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
import triton

from loraplex.kernels.cuda.programs import cuts, draws, logprobs
from loraplex.kernels.cuda.programs import logits as programs
from loraplex.kernels.sampling import DrawOptions, IntArray, TopLogprobs

BLOCK = 1024
"""Logits that a program looks at together: 8 for each of 128 threads."""
MAX_SPLITS = 32
_ALIGNMENT = 2
"""8-byte elements: Triton compiles a program anew for pointers of another alignment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Splits:
    """Splits of a row. They depend on the vocabulary alone, and so do the bits of sums."""

    vocab_size: int

    @property
    def size(self) -> int:
        """Full blocks, so that a split begins at an address as even as the row's."""
        return int(triton.cdiv(self.vocab_size, MAX_SPLITS * BLOCK)) * BLOCK

    @property
    def number(self) -> int:
        """None of them is empty."""
        return int(triton.cdiv(self.vocab_size, self.size))


def device_rows(rows: IntArray, device: torch.device) -> torch.Tensor | None:
    """[n] int64; None if they are simply the first n: then nothing has to be sent."""
    if np.array_equal(rows, np.arange(len(rows))):
        return None
    return to_device(rows, device)


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy that waits for nothing: the driver has taken pageable memory when the call returns."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def sent_together(
    arrays: list[npt.NDArray[np.generic]], device: torch.device
) -> list[torch.Tensor]:
    """Arrays [n] of int64 or float64 in one transfer; each begins at a multiple of 16 bytes."""
    size = triton.cdiv(len(arrays[0]), _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros((len(arrays), size), dtype=np.int64)
    for line, array in zip(packed, arrays, strict=True):
        line[: len(array)] = array.view(np.int64)
    lines = to_device(packed, device).unbind()
    return [
        line if array.dtype == np.int64 else line.view(torch.float64)
        for line, array in zip(lines, arrays, strict=True)
    ]


def extremes(
    logits: torch.Tensor, rows: torch.Tensor | None, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(maxima, minima of what is not -inf) [n, splits] float32 of the rows [n] of the logits.

    rows None: the first ones.
    """
    splits = Splits(logits.shape[1])
    shape = (num_rows, splits.number)
    maxima, minima = logits.new_empty(shape), logits.new_empty(shape)
    programs.extremes_of_splits[shape](
        *(maxima, minima, logits, rows, logits.stride(0)),
        VOCAB=splits.vocab_size,
        SPLIT=splits.size,
        BLOCK=BLOCK,
    )
    return maxima, minima


__all__ = ["apply_bitmask", "argmax", "draw_tokens", "top_logprobs"]


def argmax(logits: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids [n] int64, maxima [n] float32) of logits [any, vocab]; as Kernels.argmax."""
    device, num_rows = logits.device, len(rows)
    splits = Splits(logits.shape[1])
    indices = device_rows(rows, device)
    keys = torch.empty((num_rows, splits.number), dtype=torch.int32, device=device)
    split_ids = torch.empty_like(keys)
    programs.argmax_of_splits[num_rows, splits.number](
        *(keys, split_ids, logits, indices, logits.stride(0)),
        VOCAB=splits.vocab_size,
        SPLIT=splits.size,
        BLOCK=BLOCK,
    )
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    maxima = torch.empty(num_rows, dtype=torch.float32, device=device)
    programs.argmax_of_rows[(num_rows,)](
        *(maxima, token_ids, keys, split_ids),
        NUM_SPLITS=splits.number,
        BLOCK=MAX_SPLITS,
        num_warps=1,
    )
    return token_ids, maxima


def apply_bitmask(logits: torch.Tensor, rows: IntArray, bitmask: torch.Tensor) -> None:
    """logits [any, vocab] float32, in place; bitmask [n, words] int32; as Kernels.apply_bitmask."""
    num_rows, vocab_size = len(rows), logits.shape[1]
    programs.apply_bitmask[num_rows, triton.cdiv(vocab_size, BLOCK)](
        *(logits, device_rows(rows, logits.device), bitmask),
        *(logits.stride(0), bitmask.stride(0)),
        VOCAB=vocab_size,
        BLOCK=BLOCK,
    )


_CHUNK_ROWS = 64
"""Bounds the keys [rows, vocab] int64, of which the largest are found."""
_TOP_BLOCK = 32


def top_logprobs(
    logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: int
) -> TopLogprobs:
    """logits [any, vocab] float32; as Kernels.top_logprobs. Nothing waits for the device."""
    device, num_rows = logits.device, len(rows)
    splits = Splits(logits.shape[1])
    indices, chosen = sent_together([rows, token_ids], device)
    maxima, _ = extremes(logits, indices, num_rows)
    sums = torch.empty_like(maxima)
    ranks = torch.empty(maxima.shape, dtype=torch.int64, device=device)
    logprobs.sum_splits[num_rows, splits.number](
        *(sums, ranks, logits, indices, chosen, maxima, logits.stride(0)),
        VOCAB=splits.vocab_size,
        SPLIT=splits.size,
        NUM_SPLITS=splits.number,
        MAX_SPLITS=MAX_SPLITS,
        BLOCK=BLOCK,
    )
    result = TopLogprobs(
        torch.empty(num_rows, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty((num_rows, num_top), dtype=torch.int64, device=device),
        torch.empty((num_rows, num_top), device=device),
    )
    logprobs.finish[(num_rows,)](
        *(result.logprobs, result.ranks, result.top_ids, result.top_logprobs),
        *(_top_keys(logits, indices, num_rows, num_top), sums, ranks),
        *(logits, indices, chosen, maxima, num_top, logits.stride(0)),
        NUM_SPLITS=splits.number,
        MAX_SPLITS=MAX_SPLITS,
        BLOCK=_TOP_BLOCK,
        num_warps=1,
    )
    return result


def _top_keys(
    logits: torch.Tensor, indices: torch.Tensor, num_rows: int, num_top: int
) -> torch.Tensor:
    """[n, num_top] int64 that encode logits and ids, the largest first."""
    if num_top == 0:
        return indices.new_empty((num_rows, 0))
    vocab_size = logits.shape[1]
    parts = []
    for first in range(0, num_rows, _CHUNK_ROWS):
        keys = indices.new_empty((min(_CHUNK_ROWS, num_rows - first), vocab_size))
        logprobs.order_tokens[len(keys), triton.cdiv(vocab_size, BLOCK)](
            *(keys, logits, indices, first, logits.stride(0)), VOCAB=vocab_size, BLOCK=BLOCK
        )
        parts.append(torch.topk(keys, num_top, dim=-1).values)
    return torch.cat(parts)


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
class _DrawParameters:
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


def _sent(rows: IntArray, options: DrawOptions, logits: torch.Tensor) -> _DrawParameters:
    """Send the parameters in one transfer. A top-k of the whole vocabulary is none."""
    top_k = np.where(options.top_k < logits.shape[1], options.top_k, 0)
    numbers = (top_k, options.temperature, options.top_p, options.min_p, options.uniforms)
    arrays = [array.astype(np.float64, copy=False) for array in numbers]
    return _DrawParameters(*sent_together([rows, *arrays], logits.device))
