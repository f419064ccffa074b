"""What the ranks of one model exchange data through, and the order in which they add."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class DeviceChannel(Channel, Protocol):
    """Channel of the ranks of a GPU, whose exchanges are enqueued among the step's other work."""

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `gather`'s tensors as one [size, ...]."""
        ...

    def exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        """Send parts [size, ...], one to each rank, and return [size, ...], one from each rank."""
        ...


class RankChannels(NamedTuple):
    """Channels of one rank of several."""

    steps: Channel
    """Channel of the thread that computes steps."""
    loads: Channel
    """Channel of the thread that loads adapters."""


def tree_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add as ((t0 + t1) + (t2 + t3)): so 4 shares on 1, 2 or 4 ranks give the same bits.

    In general: the most tensors that are a power of two, and the rest, each added like this.
    """
    if len(tensors) == 1:
        return tensors[0]
    num_left = 1 << ((len(tensors) - 1).bit_length() - 1)
    return tree_sum(tensors[:num_left]) + tree_sum(tensors[num_left:])


def joined_shares(channel: Channel, share: torch.Tensor, total: int) -> torch.Tensor:
    """Return [total, ...], of which rank r has total * r // size .. total * (r + 1) // size."""
    starts = [total * rank // channel.size for rank in range(channel.size + 1)]
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    padded = share.new_zeros((max(sizes), *share.shape[1:]))
    padded[: len(share)] = share
    shares = channel.gather(padded)
    return torch.cat([own[:size] for own, size in zip(shares, sizes, strict=True)])
