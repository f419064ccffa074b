"""Sends the pieces of each step's LoRA batch to an accelerator, always to the same place there."""

from collections import deque

import torch

from loraplex.kernels.accelerator import Accelerator, Event
from loraplex.kernels.lora import LoraSegments

_FIRST_SIZE = 1 << 16


class SegmentUploads:
    """Used by the thread that launches steps.

    What was sent is overwritten by what is sent next, behind the steps launched in between. So a
    recorded step finds the pieces where it reads them, and nothing is copied twice.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._place = self._allocate(_FIRST_SIZE)
        self._sent: deque[tuple[torch.Tensor, Event]] = deque()
        """Pinned buffers, and when each may be used again."""

    def send(self, segments: LoraSegments) -> LoraSegments:
        """Segments on the host -> the same on the device, valid until the next call."""
        size = len(segments.packed)
        if size > len(self._place):
            self._place = self._allocate(size)
        staging = self._staging(size)
        staging[:size].copy_(segments.packed)
        place = self._place[:size]
        with self._accelerator.compute():
            self._accelerator.copy(staging[:size], place)
            self._sent.append((staging, self._accelerator.event()))
        return segments.at(place)

    def _staging(self, size: int) -> torch.Tensor:
        if self._sent and self._sent[0][1].has_passed():
            staging, _ = self._sent.popleft()
            if len(staging) >= size:
                return staging
        return self._accelerator.pinned((_room(size),), torch.int32)

    def _allocate(self, size: int) -> torch.Tensor:
        with self._accelerator.compute():
            return torch.empty(_room(size), dtype=torch.int32, device=self._accelerator.device)


def _room(size: int) -> int:
    """The next power of two, so that it is seldom too small."""
    return max(_FIRST_SIZE, 1 << (size - 1).bit_length())
