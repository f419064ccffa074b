"""Copies of packed adapters into pages of the pool, in an accelerator's copy queue.

Steps that use an adapter which is still arriving wait for it on the device, layer by layer.

A copy never overwrites what a launched step reads. The pages that it is given are of no adapter
that a plan names which is not absorbed yet (the adapter cache unpins a sequence's adapters only
then), and a plan is absorbed when its results are on the host, behind all that its step computes.
An older copy into the same pages may still be under way: copies happen in the order of their queue,
and whoever reads the pages then has waited for the newer one.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from loraplex.core.adapter import OUTSIDE_LAYERS, AdapterHandle
from loraplex.core.plan import PageId
from loraplex.execution.adapters.pinned_pages import PageLease
from loraplex.kernels.accelerator import Accelerator, Event
from loraplex.kernels.lora import Arrivals
from loraplex.memory.adapter_pages import Placement


class _Arrival(NamedTuple):
    """All that an adapter has up to this layer is there, once the event has passed."""

    last_layer: int
    event: Event


@dataclasses.dataclass(slots=True)
class _Copy:
    handle: AdapterHandle
    lease: PageLease
    """Kept until all of it has been copied, whoever else has dropped it."""
    arrivals: tuple[_Arrival, ...]
    is_told: bool = False
    is_forgotten: bool = False

    @property
    def has_begun_to_arrive(self) -> bool:
        return not self.arrivals or self.arrivals[0].event.has_passed()

    @property
    def has_arrived(self) -> bool:
        return not self.arrivals or self.arrivals[-1].event.has_passed()


class PageCopies:
    """Used by the thread that runs the steps."""

    def __init__(self, accelerator: Accelerator, pool: torch.Tensor) -> None:
        """pool: [num_pages, page_elements]"""
        self._accelerator = accelerator
        self._pool = pool
        self._under_way: deque[_Copy] = deque()
        """In the order of their starts, which is that of their ends."""
        self._latest: dict[AdapterHandle, _Copy] = {}
        """Of what is not forgotten, and not known to be all there."""

    def start(
        self,
        handle: AdapterHandle,
        lease: PageLease,
        placement: Placement,
        page_ids: Sequence[PageId],
    ) -> None:
        """Begin to copy: at once if the queue is empty. Replaces an older copy of the handle."""
        self.forget(handle)
        completed = _completed_layers(placement)
        arrivals = []
        with self._accelerator.copies():
            for page, page_id, layer in zip(lease.pages, page_ids, completed, strict=True):
                self._accelerator.copy(page, self._pool[page_id])
                if layer is not None:
                    arrivals.append(_Arrival(layer, self._accelerator.event()))
        copy = _Copy(handle, lease, tuple(arrivals))
        self._under_way.append(copy)
        self._latest[handle] = copy

    def forget(self, handle: AdapterHandle) -> None:
        """Its pages are another's from now on, or it is copied once more. Its end is not told."""
        copy = self._latest.pop(handle, None)
        if copy is not None:
            copy.is_forgotten = True

    def begun(self, *, wait: bool) -> tuple[AdapterHandle, ...]:
        """Copies whose first layers are there, each told once. wait: until one is, if there is any.

        A step may be launched that uses them.
        """
        untold = [c for c in self._under_way if not (c.is_told or c.is_forgotten)]
        if wait and untold and untold[0].arrivals:
            untold[0].arrivals[0].event.wait()
        told = [copy for copy in untold if copy.has_begun_to_arrive]
        for copy in told:
            copy.is_told = True
        self._retire()
        return tuple(copy.handle for copy in told)

    def outstanding(self, handles: Iterable[AdapterHandle]) -> Arrivals | None:
        """What a step of these adapters has to wait for; None if all of it is there."""
        copies = [self._latest[handle] for handle in handles if handle in self._latest]
        arrivals = [copy.arrivals for copy in copies if not copy.has_arrived]
        return _StepArrivals(self._accelerator, arrivals) if arrivals else None

    def _retire(self) -> None:
        """Drop what is told and all there."""
        while self._under_way and self._under_way[0].has_arrived:
            copy = self._under_way[0]
            if not (copy.is_told or copy.is_forgotten):
                return
            self._under_way.popleft()
            if not copy.is_forgotten:
                del self._latest[copy.handle]


class _StepArrivals:
    """Implements Arrivals."""

    def __init__(self, accelerator: Accelerator, copies: Sequence[Sequence[_Arrival]]) -> None:
        self._accelerator = accelerator
        self._ahead = [deque(arrivals) for arrivals in copies]
        self._reached = [OUTSIDE_LAYERS - 1] * len(copies)
        """The last layer of each copy that was waited for."""

    def wait_for(self, layer: int) -> None:
        for index, ahead in enumerate(self._ahead):
            event = None
            while ahead and self._reached[index] < layer:
                self._reached[index], event = ahead.popleft()
            if event is not None:
                self._accelerator.after(event)


def _completed_layers(placement: Placement) -> list[int | None]:
    """By page: the last layer of which nothing lies in a later page; None: it completes none."""
    completed: list[int | None] = [None] * placement.num_pages
    last_pages = {target.layer: page for target, page, _ in placement.places}
    for layer in sorted(last_pages):
        completed[last_pages[layer]] = layer
    return completed
