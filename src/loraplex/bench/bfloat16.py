"""bfloat16 without torch: the upper half of a float32, as numpy's uint16."""

import numpy as np
from numpy.typing import NDArray


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers, ties to even. No value may be NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
