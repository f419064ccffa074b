"""What the ranks of one model exchange data through, and the order in which they add."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Channel(Protocol):
    """One rank's end of an exchange with the other ranks.

    Every rank makes the same calls of `gather` in the same order, on one thread.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape and dtype.

        Waits for the other ranks. Raises DeviceLost after an abort.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the waits of all ranks, now and later. May be called from any thread."""
        ...

    def close(self) -> None:
        """Release the exchange's memory. No other call may be in progress, or come later."""
        ...


def tree_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add as ((t0 + t1) + (t2 + t3)): so 4 shares on 1, 2 or 4 ranks give the same bits.

    In general: the most tensors that are a power of two, and the rest, each added like this.
    """
    if len(tensors) == 1:
        return tensors[0]
    num_left = 1 << ((len(tensors) - 1).bit_length() - 1)
    return tree_sum(tensors[:num_left]) + tree_sum(tensors[num_left:])
