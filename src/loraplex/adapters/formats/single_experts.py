"""Separation of tensors with the LoRA of all experts into those of single experts."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger]
"""Bit patterns of floats."""


def magnitudes(bits: Bits) -> Bits:
    """Return the bits without signs: zero of a float zero only."""
    return bits & np.array(2 ** (8 * bits.itemsize - 1) - 1, bits.dtype)


def single_experts(a: Bits, b: Bits, num_experts: int) -> Iterator[tuple[int, Bits, Bits]]:
    """Yield the number, A [rank, in] and B [out, rank] of each expert whose B is not zero.

    a [experts or 1, rank, in], b [experts or 1, out, rank]. What B multiplies by zero is left out,
    so each expert has its true rank: a block-diagonal B, such as PEFT makes of separate gate and
    up, and ranks that were filled up with zeros for a common one.
    """
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    used = np.any(magnitudes(b), axis=1, keepdims=True)[:, 0]  # [experts or 1, rank]
    for expert in range(num_experts):
        of_a, of_b = a[expert % len(a)], b[expert % len(b)]
        columns = used[expert % len(b)]
        if columns.all():
            yield expert, of_a, of_b
        elif columns.any():
            yield expert, of_a[columns], np.ascontiguousarray(of_b[:, columns])
