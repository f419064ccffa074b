"""Places of adapters' output vectors (DoRA's factors, biases) in a LoraTable.

A backend that reads the table on its device applies them in its kernels of LoRA, so that a step
with such adapters is the recorded step of any adapters. A cell has up to MAX_VECTORS words, in the
order in which the vectors are applied; zeros follow. A word is a vector's first element in the
pool, in units of the table's alignment, times FLAGS, plus FACTOR, SHIFT or both; of both the shift
follows the factor.
"""

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.adapter_parts import OutputVector

MAX_VECTORS = 3
"""Vectors of a linear layer: a bias, DoRA's factor, and a bias of lora_B."""

SHIFT = 1
FACTOR = 2
FLAGS = 4


def vectors_at(
    words: npt.NDArray[np.int32], pool: torch.Tensor, out_features: int, alignment: int
) -> list[OutputVector]:
    """Return the vectors of a cell, [out_features] each: views of the pool."""
    vectors = []
    for word in words[words > 0].tolist():
        first, flags = word // FLAGS * alignment, word % FLAGS
        size = out_features * (2 if flags == FACTOR | SHIFT else 1)
        rows = pool[first : first + size].view(-1, out_features)
        factor = rows[0] if flags & FACTOR else None
        vectors.append(OutputVector(0, factor, rows[-1] if flags & SHIFT else None))
    return vectors
