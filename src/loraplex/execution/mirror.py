"""Numbers that the host makes for every step, and an accelerator reads at addresses that stay."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.accelerator import Accelerator, DeviceEvent

_ALIGNMENT = 64
"""Bytes: of every array, so that wide loads may read it."""
_NUM_BUFFERS = 3
"""One for each step in flight, and one to be filled."""

Array = npt.NDArray[np.int64] | npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class _Buffer:
    pinned: torch.Tensor
    sent: DeviceEvent | None = None
    """Event after the copy that reads it."""


class Mirror:
    """Each `send` fills one of a few pinned buffers, and copies it by one call to the device.

    The device has one buffer, which is overwritten in the order of the compute queue: what was sent
    is there until the next `send`.
    """

    def __init__(self, accelerator: Accelerator, num_bytes: int) -> None:
        """num_bytes: of what will be sent at once. It may be more: then the addresses change."""
        self._accelerator = accelerator
        self._next = 0
        self._make(num_bytes)

    def send(
        self, arrays: Sequence[Array], capacities: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """The arrays on the device, within accelerator.compute().

        capacities: maximum number of elements of each; with the same capacities they lie at the
        same addresses. None: their numbers of elements.
        """
        sizes = capacities or [array.size for array in arrays]
        ends = np.cumsum(
            [_aligned(n * array.itemsize) for n, array in zip(sizes, arrays, strict=True)]
        ).tolist()
        starts = [0, *ends[:-1]]
        if ends[-1] > len(self._target):
            self._make(2 * ends[-1])
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        if buffer.sent is not None:
            buffer.sent.wait()
        filled = 0
        host = buffer.pinned.numpy()
        for start, array in zip(starts, arrays, strict=True):
            filled = start + array.nbytes
            host[start:filled].view(array.dtype)[:] = array
        if filled:
            self._accelerator.copy(buffer.pinned[:filled], self._target[:filled])
            buffer.sent = self._accelerator.event()
        return [
            self._target[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype])
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _make(self, num_bytes: int) -> None:
        size = _aligned(max(num_bytes, 1))
        device = self._accelerator.device
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self._buffers = [
            _Buffer(self._accelerator.pinned((size,), torch.uint8)) for _ in range(_NUM_BUFFERS)
        ]
        self._next = 0


def num_bytes_of(capacities: Sequence[int], itemsizes: Sequence[int]) -> int:
    """Return the bytes of arrays that are sent at once."""
    return sum(_aligned(n * size) for n, size in zip(capacities, itemsizes, strict=True))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_TORCH_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
