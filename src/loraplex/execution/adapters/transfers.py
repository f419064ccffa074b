"""Transfers to an accelerator: copies of packed adapters, and each step's LoRA segments.

Steps that use an adapter which is still arriving wait for it on the device, layer by layer.

A copy never overwrites what a launched step reads. Its pages belong to no adapter of a plan that is
not absorbed yet (a sequence's adapters are in use until then), and a plan is absorbed when its
results are on the host, after everything that its step computes. An older copy into the same pages
may still be in flight: copies run in the order of their queue, and a step that reads the pages has
waited for the newer one.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from loraplex.core.adapter import OUTSIDE_LAYERS, AdapterHandle
from loraplex.core.plan import PageGeometry, PageId
from loraplex.execution.adapters.pinned_pages import PageLease, PinnedPages
from loraplex.kernels.accelerator import Accelerator, DeviceEvent
from loraplex.kernels.lora import Arrivals, LoraSegments
from loraplex.memory.adapter_pages import Placement


class _LayerArrival(NamedTuple):
    """Event after which an adapter has arrived up to a layer."""

    last_layer: int
    event: DeviceEvent


@dataclasses.dataclass(slots=True)
class _PageCopy:
    handle: AdapterHandle
    lease: PageLease
    """Host pages, kept until all of them have been copied."""
    arrivals: tuple[_LayerArrival, ...]
    is_reported: bool = False
    is_forgotten: bool = False

    @property
    def has_begun_to_arrive(self) -> bool:
        return not self.arrivals or self.arrivals[0].event.has_passed()

    @property
    def has_arrived(self) -> bool:
        return not self.arrivals or self.arrivals[-1].event.has_passed()


class PageCopies:
    """Copies in flight. The thread that runs the steps uses them."""

    def __init__(
        self, accelerator: Accelerator, pool: torch.Tensor, *, reports_whole: bool = False
    ) -> None:
        """pool: [num_pages, page_elements].

        reports_whole: no step waits for layers of a copy: `begun` returns it when all have arrived.
        """
        self._reports_whole = reports_whole
        self._accelerator = accelerator
        self._pool = pool
        self._pending: deque[_PageCopy] = deque()
        """Copies in the order of their starts, which is that of their ends."""
        self._latest: dict[AdapterHandle, _PageCopy] = {}
        """Latest copy of each handle that is neither forgotten nor known to be complete."""

    def start(
        self,
        handle: AdapterHandle,
        lease: PageLease,
        placement: Placement,
        page_ids: Sequence[PageId],
    ) -> None:
        """Begin a copy, at once if the queue is empty. Replaces an older copy of the handle."""
        self.forget(handle)
        completed = _completed_layers(placement)
        arrivals = []
        with self._accelerator.copies():
            for page, page_id, layer in zip(lease.pages, page_ids, completed, strict=True):
                self._accelerator.copy(page, self._pool[page_id])
                if layer is not None:
                    arrivals.append(_LayerArrival(layer, self._accelerator.event()))
        copy = _PageCopy(handle, lease, tuple(arrivals))
        self._pending.append(copy)
        self._latest[handle] = copy

    def forget(self, handle: AdapterHandle) -> None:
        """Forget a copy whose pages are reused or which is repeated: `begun` ignores it."""
        copy = self._latest.pop(handle, None)
        if copy is not None:
            copy.is_forgotten = True

    def begun(self, *, wait: bool) -> tuple[AdapterHandle, ...]:
        """Return the copies whose first layers, or all, have arrived, each once.

        Steps that use them may be launched. wait: wait for one, if there is any.
        """
        unreported = [c for c in self._pending if not (c.is_reported or c.is_forgotten)]
        if wait and unreported and unreported[0].arrivals:
            unreported[0].arrivals[-1 if self._reports_whole else 0].event.wait()
        reported = [
            copy
            for copy in unreported
            if (copy.has_arrived if self._reports_whole else copy.has_begun_to_arrive)
        ]
        for copy in reported:
            copy.is_reported = True
        self._retire()
        return tuple(copy.handle for copy in reported)

    def outstanding(self, handles: Iterable[AdapterHandle]) -> Arrivals | None:
        """Return what a step with these adapters must wait for; None if all has arrived."""
        copies = [self._latest[handle] for handle in handles if handle in self._latest]
        arrivals = [copy.arrivals for copy in copies if not copy.has_arrived]
        return _StepArrivals(self._accelerator, arrivals) if arrivals else None

    def _retire(self) -> None:
        """Drop copies that were returned and are complete."""
        while self._pending and self._pending[0].has_arrived:
            copy = self._pending[0]
            if not (copy.is_reported or copy.is_forgotten):
                return
            self._pending.popleft()
            if not copy.is_forgotten:
                del self._latest[copy.handle]


class _StepArrivals:
    """Implements Arrivals."""

    def __init__(self, accelerator: Accelerator, copies: Sequence[Sequence[_LayerArrival]]) -> None:
        self._accelerator = accelerator
        self._ahead = [deque(arrivals) for arrivals in copies]
        self._reached = [OUTSIDE_LAYERS - 1] * len(copies)
        """Last layer of each copy that was waited for."""

    def wait_for(self, layer: int) -> None:
        for index, ahead in enumerate(self._ahead):
            event = None
            while ahead and self._reached[index] < layer:
                self._reached[index], event = ahead.popleft()
            if event is not None:
                self._accelerator.after(event)


def _completed_layers(placement: Placement) -> list[int | None]:
    """Return by page the last layer that ends in it; None if the page completes no layer."""
    completed: list[int | None] = [None] * placement.num_pages
    last_pages = {target.layer: page for target, page, _ in placement.places}
    for layer in sorted(last_pages):
        completed[last_pages[layer]] = layer
    return completed


_FIRST_SIZE = 1 << 16


class SegmentUploads:
    """Uploader of the thread that launches steps.

    An upload overwrites the previous one, after the steps that were launched in between. So a
    recorded step finds the segments at its address, and nothing is copied twice.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._place = self._allocate(_FIRST_SIZE)
        self._sent: deque[tuple[torch.Tensor, DeviceEvent]] = deque()
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


class Transfers:
    """Transfers of a bank to an accelerator: its copies, and the host memory that they read."""

    def __init__(
        self,
        accelerator: Accelerator,
        geometry: PageGeometry,
        pool: torch.Tensor,
        *,
        is_alone: bool,
    ) -> None:
        self.accelerator = accelerator
        self.pages = PinnedPages(accelerator, geometry.page_elements, pool.dtype)
        pages = pool.view(-1, geometry.page_elements)
        self.copies = PageCopies(accelerator, pages, reports_whole=not is_alone)
        self.segments = SegmentUploads(accelerator)
