"""Accelerator whose copies happen as late as possible: a missing wait shows as a wrong output.

Its device is the CPU. Kernels run at once. The copies of the copy queue, and the copies of both
queues to pinned memory, are late: they happen when an event after them is waited for, when the
compute queue goes `after` such an event, or after some calls of `has_passed`.
"""

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loraplex.kernels.accelerator import DeviceEvent, DeviceMemory, Graph, HostAccelerator


class _Queue:
    """What has not happened yet, and how much has been enqueued and has happened so far."""

    def __init__(self) -> None:
        self.num_enqueued = 0
        self._outstanding: deque[Callable[[], None]] = deque()
        self.num_waits = 0
        """Number of waits for outstanding actions."""

    @property
    def num_done(self) -> int:
        return self.num_enqueued - len(self._outstanding)

    def put(self, action: Callable[[], None]) -> None:
        self._outstanding.append(action)
        self.num_enqueued += 1

    def advance(self, num_done: int) -> None:
        """Run copies until this many of all enqueued ones have happened."""
        with torch.inference_mode():
            while self.num_done < num_done:
                self._outstanding.popleft()()


class _DelayedEvent:
    """Implements DeviceEvent."""

    def __init__(self, queue: _Queue, lock: threading.RLock, num_polls: int) -> None:
        self.queue = queue
        self.position = queue.num_enqueued
        self._lock = lock
        self._num_polls = num_polls

    def has_passed(self) -> bool:
        with self._lock:
            self._num_polls -= 1
            if self._num_polls < 0:
                self.queue.advance(self.position)
            return self.queue.num_done >= self.position

    def wait(self) -> None:
        with self._lock:
            self.queue.advance(self.position)


class DelayedAccelerator:
    """Implements Accelerator. The targets of what has not happened yet are full of rubbish.

    Raises AssertionError for work outside both queues, and, when a copy happens, if the host has
    changed its source since it was enqueued. As with torch, memory stays until its copies happened.
    """

    def __init__(self, *, seed: int = 0, most_polls: int = 3) -> None:
        """most_polls: an event passes after 0 to so many calls of has_passed; drawn by the seed."""
        self._random = random.Random(seed)
        self._most_polls = most_polls
        self._lock = threading.RLock()
        self._compute = _Queue()
        self._copies = _Queue()
        self._current = threading.local()
        self._pinned: dict[int, StorageWeakRef] = {}
        self._host = HostAccelerator()

    @property
    def device(self) -> torch.device:
        return self._host.device

    @property
    def num_outstanding(self) -> int:
        """Number of outstanding copies of the copy queue."""
        return self._copies.num_enqueued - self._copies.num_done

    def advance(self, num_copies: int = 1) -> None:
        """Run this many copies of the copy queue now."""
        with self._lock:
            target = min(self._copies.num_done + num_copies, self._copies.num_enqueued)
            self._copies.advance(target)

    def compute(self) -> AbstractContextManager[None]:
        return self._chosen(self._compute)

    def copies(self) -> AbstractContextManager[None]:
        return self._chosen(self._copies)

    def event(self) -> DeviceEvent:
        num_polls = self._random.randint(0, self._most_polls)
        return _DelayedEvent(self._queue(), self._lock, num_polls)

    def after(self, event: DeviceEvent) -> None:
        assert isinstance(event, _DelayedEvent), "an event of this accelerator"
        queue = self._queue()
        if queue is self._compute:
            event.wait()
        elif event.queue is not queue:
            queue.num_waits += 1
            queue.put(lambda: self._end_wait(queue, event))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype == target.dtype, "a copy converts nothing"
        with self._lock:
            queue = self._queue()
            if queue is self._compute and not self._is_pinned(target):
                target.copy_(source)
                if self._is_pinned(source):
                    queue.put(_check_of(source))
                return
            if queue is self._copies and self._is_pinned(source):
                queue.put(_late_copy(source, target))
            else:
                queue.put(_snapshot_copy(source, target))
            if queue.num_waits == 0:
                _spoil(target)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._lock:
            buffer = torch.zeros(shape, dtype=dtype)
            reference = StorageWeakRef(buffer.untyped_storage())  # type: ignore[no-untyped-call]
            self._pinned[buffer.data_ptr()] = reference
            return buffer

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Graph]:
        return self._host.record(compute)

    def synchronize(self) -> None:
        with self._lock:
            self._compute.advance(self._compute.num_enqueued)
            self._copies.advance(self._copies.num_enqueued)

    def memory(self) -> DeviceMemory | None:
        return self._host.memory()

    def reset_peak(self) -> None:
        self._host.reset_peak()

    def trim(self) -> None:
        self._host.trim()

    @contextlib.contextmanager
    def _chosen(self, queue: _Queue) -> Iterator[None]:
        before = getattr(self._current, "queue", None)
        self._current.queue = queue
        try:
            yield
        finally:
            self._current.queue = before

    def _queue(self) -> _Queue:
        queue: _Queue | None = getattr(self._current, "queue", None)
        assert queue is not None, "work is enqueued within compute() or copies()"
        return queue

    def _end_wait(self, queue: _Queue, event: DeviceEvent) -> None:
        event.wait()
        queue.num_waits -= 1

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        buffer = self._pinned.get(tensor.untyped_storage().data_ptr())
        return buffer is not None and not buffer.expired()  # type: ignore[no-untyped-call]


def _late_copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Copy the source's later contents, which must equal its present contents."""
    check = _check_of(source)

    def happen() -> None:
        check()
        target.copy_(source)

    return happen


def _snapshot_copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Copy the source's present contents late: later kernels of its queue may change it."""
    values = source.clone()

    def happen() -> None:
        target.copy_(values)

    return happen


def _check_of(source: torch.Tensor) -> Callable[[], None]:
    """Fails if the host has changed the source meanwhile."""
    before = source.clone()

    def check() -> None:
        assert _bytes(source).equal(_bytes(before)), (
            "the host changed pinned memory before a copy of it had happened"
        )

    return check


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _spoil(target: torch.Tensor) -> None:
    target.fill_(float("nan") if target.dtype.is_floating_point else -1)
