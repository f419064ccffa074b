"""Uploads of each step's LoRA segments to an accelerator, always to the same address."""

from collections import deque

import torch

from loraplex.kernels.accelerator import Accelerator, Event
from loraplex.kernels.lora_segments import LoraSegments

_FIRST_SIZE = 1 << 16


class SegmentUploads:
    """Uploader of the thread that launches steps.

    An upload overwrites the previous one, after the steps that were launched in between. So a
    recorded step finds the segments at its address, and nothing is copied twice.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._place = self._allocate(_FIRST_SIZE)
        self._sent: deque[tuple[torch.Tensor, Event]] = deque()
        """Pinned buffers, with the event after which each may be used again."""

    def send(self, segments: LoraSegments) -> LoraSegments:
        """Copy segments to the device; the result is valid until the next call."""
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
        return self._accelerator.pinned((_capacity(size),), torch.int32)

    def _allocate(self, size: int) -> torch.Tensor:
        with self._accelerator.compute():
            return torch.empty(_capacity(size), dtype=torch.int32, device=self._accelerator.device)


def _capacity(size: int) -> int:
    """Round up to a power of two, so that the buffer is seldom too small."""
    return max(_FIRST_SIZE, 1 << (size - 1).bit_length())
