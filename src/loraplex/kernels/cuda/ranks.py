"""Sums over the ranks of a model with a GPU each: what each computed for its part of the inputs.

A few rows go to every rank whole, in one exchange, which costs a start. Many rows cost their bytes:
each rank then adds the rows of its own, rounds them, and sends only those on. Which way is taken
follows from shapes, so all ranks take the same one.
"""

import itertools

import torch
import triton
from torch.nn import functional

from loraplex.kernels.channel import DeviceChannel
from loraplex.kernels.cuda.programs.linear import add_shares

_COLUMNS_AT_ONCE = 512

_FEW_BYTES = 1 << 20
"""Size of a rank's share up to which the start of an exchange costs more than its bytes."""

_FEW_RANKS = 2
"""So few send no less in two exchanges."""


def sum_of_shares(
    shares: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """shares [any, rows, n] float32, whose last axis is contiguous, bias [n] -> [rows, n]."""
    num_shares, num_rows, num_columns = shares.shape
    y = torch.empty(num_rows, num_columns, dtype=dtype, device=shares.device)
    if not num_rows:
        return y
    block = min(triton.next_power_of_2(num_columns), _COLUMNS_AT_ONCE)
    add_shares[num_rows, triton.cdiv(num_columns, block)](
        *(y, shares, bias, num_columns, shares.stride(0), shares.stride(1), y.stride(0)),
        NUM_SHARES=num_shares,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=2,
    )
    return y


class RankSums:
    """Used by the thread that computes steps. Every rank makes the same calls."""

    def __init__(self, channel: DeviceChannel) -> None:
        self._channel = channel

    @property
    def adds_bias(self) -> bool:
        """Whether this rank's share has the bias, where the ranks' sum gets none."""
        return self._channel.rank == 0

    def total(
        self, share: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """share [T, n] float32 of each rank -> [T, n]: their sum + bias, rounded once."""
        num_rows, size = len(share), self._channel.size
        if share.nbytes <= _FEW_BYTES or size <= _FEW_RANKS:
            return sum_of_shares(self._channel.gathered(share), bias, dtype)
        padded = functional.pad(share, (0, 0, 0, -num_rows % size))
        own = self._channel.exchanged(padded.view(size, -1, share.shape[1]))
        return self._channel.gathered(sum_of_shares(own, bias, dtype)).flatten(0, 1)[:num_rows]

    def total_of_splits(self, partials: torch.Tensor) -> torch.Tensor:
        """partials [..., splits, n] float32, contiguous, of each rank -> their sum [..., 1, n]."""
        *rows, num_splits, size = partials.shape
        shares = partials.view(-1, num_splits, size).transpose(0, 1)
        own = shares[0] if num_splits == 1 else sum_of_shares(shares, None, torch.float32)
        return self.total(own, None, torch.float32).view(*rows, 1, size)

    def columns(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """x [T, n] of each rank -> [T, total]; see Kernels.gather_columns."""
        size = self._channel.size
        starts = [total * rank // size for rank in range(size + 1)]
        widths = [end - start for start, end in itertools.pairwise(starts)]
        padded = functional.pad(x, (0, max(widths) - x.shape[1]))
        shares = self._channel.gathered(padded.contiguous())
        return torch.cat([own[:, :width] for own, width in zip(shares, widths, strict=True)], 1)
