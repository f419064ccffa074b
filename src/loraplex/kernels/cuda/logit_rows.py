"""Rows of logits on a GPU: where they are, and how they are split among programs."""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
import triton

from loraplex.kernels.cuda.programs import logits as programs
from loraplex.kernels.sampling import IntArray

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
