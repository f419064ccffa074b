"""Waiting sequences: one queue for each fair share and set of adapters, and their limit."""

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import LoraplexError, QueueFullError
from loraplex.scheduling.request import OrderKey, Sequence, ShareKey

_Index = TypeVar("_Index", ShareKey, AdapterHandle)

QueueKey = tuple[int, float, OrderKey]
"""(priority of the head, counter of the share, scheduling order of the head)."""


@dataclasses.dataclass(slots=True, eq=False)
class AdapterQueue:
    """Waiting sequences of one share with the same distinct adapters, in scheduling order.

    It is never empty while it is in a WaitingQueue, which alone changes it.
    """

    share: ShareKey
    handles: tuple[AdapterHandle, ...]
    ready_since_ns: int = 0
    """Time when its adapters were first seen on the device; 0 while they are not."""
    has_lead: bool = False
    """Whether the last plan that looked at it could have admitted it."""
    entries: list[tuple[OrderKey, Sequence]] = dataclasses.field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.ready_since_ns > 0

    @property
    def head(self) -> Sequence:
        return self.entries[0][1]

    def shortest(self, num_candidates: int) -> Sequence:
        """Return the sequence with the fewest tokens among the first num_candidates."""
        entries = itertools.islice(self.entries, num_candidates)
        return min(
            (sequence for _, sequence in entries),
            key=lambda sequence: sequence.num_tokens + sequence.request.num_encoder_tokens,
        )

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self.entries)


class WaitingQueue:
    """All waiting sequences, in queues ordered by QueueKey.

    The sequences of one set of adapters wait for the same pages. So a plan that cannot place an
    adapter passes over all its sequences at once, and one queue's wait blocks no other queue.
    """

    def __init__(
        self,
        counter: Callable[[ShareKey], float] = lambda _share: 0.0,
        resident_lead: float = 0.0,
    ) -> None:
        """counter: service that a share has had so far; it only grows.

        resident_lead: subtracted for a queue that could have been admitted by the last plan.
        """
        self._counter = counter
        self._resident_lead = resident_lead
        self._queues: dict[tuple[ShareKey, tuple[AdapterHandle, ...]], AdapterQueue] = {}
        self.by_share: dict[ShareKey, dict[AdapterQueue, None]] = {}
        """Queues of the shares that have a waiting sequence."""
        self.by_handle: dict[AdapterHandle, dict[AdapterQueue, None]] = {}
        self._key_of: dict[AdapterQueue, QueueKey] = {}
        """Key under which each queue is listed. The real key may have grown since: a scan lists a
        queue anew when it reaches it, so queues that no scan reaches cost nothing."""
        self._ready: list[tuple[QueueKey, AdapterQueue]] = []
        """Queues whose adapters are on the device, in the order of their keys."""
        self._unready: list[tuple[QueueKey, AdapterQueue]] = []
        self._new: dict[AdapterQueue, None] = {}
        """Queues since the last `update_ready`; they are listed as not ready."""
        self._num_waiting = 0

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all sequences, queue by queue."""
        return (sequence for queue in self._queues.values() for sequence in queue)

    @property
    def queues(self) -> Collection[AdapterQueue]:
        """All queues, in no order."""
        return self._queues.values()

    def scan(self) -> "QueueScan":
        """Start one pass over all queues in order."""
        return QueueScan(self)

    def first_after(
        self, key: QueueKey | None, *, ready_only: bool = False
    ) -> tuple[QueueKey, AdapterQueue] | None:
        """Return the first queue listed after a key, and its own key. None starts at the front.

        ready_only: pass over queues whose adapters are not on the device, at no cost.
        """
        orders = (self._ready,) if ready_only else (self._ready, self._unready)
        return min((e for order in orders if (e := _first_after(order, key))), default=None)

    def unready(self, place: int, num_queues: int) -> list[AdapterQueue]:
        """Return queues whose adapters are not on the device, from a place in their order on."""
        return [queue for _, queue in self._unready[place : place + num_queues]]

    def relist(self, queue: AdapterQueue) -> QueueKey:
        """List a queue where it belongs now; return its key."""
        key = self._key(queue)
        if key != self._key_of[queue]:
            self._unlist(queue)
            self._list(queue, key)
        return key

    def set_lead(self, queue: AdapterQueue, *, has_lead: bool) -> None:
        """Note whether a queue's adapters are on the device and no aged request needs them."""
        had_lead, queue.has_lead = queue.has_lead, has_lead
        if has_lead and not had_lead:
            self.relist(queue)

    def update_ready(
        self,
        moved: Iterable[AdapterHandle],
        now_ns: int,
        is_on_device: Callable[[AdapterHandle], bool],
    ) -> None:
        """Note which queues have all their adapters on the device.

        moved: adapters that came to the device or left it since the last call. Only their queues
        and new ones are looked at.
        """
        due = [queue for handle in moved for queue in self.by_handle.get(handle, ())]
        for queue in dict.fromkeys([*self._new, *due]):
            is_ready = all(map(is_on_device, queue.handles))
            if is_ready != queue.is_ready:
                self._unlist(queue)
                queue.ready_since_ns = now_ns if is_ready else 0
                self._list(queue, self._key(queue))
        self._new.clear()

    def add(self, sequence: Sequence) -> None:
        share, handles = sequence.request.share, sequence.request.handles
        queue = self._queues.get((share, handles))
        if queue is None:
            queue = self._queues[share, handles] = AdapterQueue(share, handles)
            self._new[queue] = None
            self.by_share.setdefault(share, {})[queue] = None
            for handle in handles:
                self.by_handle.setdefault(handle, {})[queue] = None
        else:
            self._unlist(queue)
        bisect.insort(queue.entries, (sequence.key, sequence))
        self._list(queue, self._key(queue))
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.request.share, sequence.request.handles]
        self._unlist(queue)
        index = bisect.bisect_left(queue.entries, (sequence.key,))
        assert queue.entries[index][1] is sequence
        del queue.entries[index]
        if queue:
            self._list(queue, self._key(queue))
        else:
            self._forget(queue)
        self._num_waiting -= 1

    def num_by_handle(self) -> Counter[AdapterHandle]:
        """Return how many waiting sequences need each adapter."""
        counts: Counter[AdapterHandle] = Counter()
        for queue in self._queues.values():
            for handle in queue.handles:
                counts[handle] += len(queue)
        return counts

    def check(self) -> None:
        """Assert that every queue is listed once, by its head, and never after its place."""
        order = [*self._ready, *self._unready]
        assert len(order) == len(self._queues) == len(self._key_of)
        assert self._num_waiting == sum(len(queue) for queue in self._queues.values())
        assert self._ready == sorted(self._ready)
        assert self._unready == sorted(self._unready)
        assert all(queue.is_ready for _, queue in self._ready)
        assert not any(queue.is_ready for _, queue in self._unready)
        assert self._new.keys() <= set(self._queues.values())
        assert all(self._key_of[queue] == key for key, queue in order)
        for (share, handles), queue in self._queues.items():
            assert (share, handles) == (queue.share, queue.handles)
            assert len(queue), "an empty queue"
            assert queue in self.by_share[share]
            assert all(queue in self.by_handle[handle] for handle in handles)
            assert self._key_of[queue] <= self._key(queue)
            assert self._key_of[queue][2] == queue.head.key
        assert sum(len(queues) for queues in self.by_share.values()) == len(self._queues)
        num_handles = sum(len(queue.handles) for queue in self._queues.values())
        assert sum(len(queues) for queues in self.by_handle.values()) == num_handles

    def _key(self, queue: AdapterQueue) -> QueueKey:
        key = queue.entries[0][0]
        lead = self._resident_lead if queue.has_lead else 0.0
        return (key[0], self._counter(queue.share) - lead, key)

    def _list(self, queue: AdapterQueue, key: QueueKey) -> None:
        self._key_of[queue] = key
        bisect.insort(self._ready if queue.ready_since_ns else self._unready, (key, queue))

    def _unlist(self, queue: AdapterQueue) -> None:
        order = self._ready if queue.ready_since_ns else self._unready
        index = bisect.bisect_left(order, (self._key_of.pop(queue),))
        assert order[index][1] is queue
        del order[index]

    def _forget(self, queue: AdapterQueue) -> None:
        del self._queues[queue.share, queue.handles]
        self._new.pop(queue, None)
        _remove(self.by_share, queue.share, queue)
        for handle in queue.handles:
            _remove(self.by_handle, handle, queue)


def _first_after(
    order: list[tuple[QueueKey, AdapterQueue]], key: QueueKey | None
) -> tuple[QueueKey, AdapterQueue] | None:
    index = 0
    if key is not None:
        index = bisect.bisect_left(order, (key,))
        index += index < len(order) and order[index][0] == key
    return order[index] if index < len(order) else None


def _remove(
    queues: dict[_Index, dict[AdapterQueue, None]], index: _Index, queue: AdapterQueue
) -> None:
    """Remove a queue from an index, and the entry with its last queue."""
    del queues[index][queue]
    if not queues[index]:
        del queues[index]


class QueueScan:
    """One pass over the queues, in which sequences are taken out.

    Each queue comes once, and again after `revisit`. In a pass a share's counter only grows, when
    one of its sequences is taken. Then all its queues move back, also those still to come.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._place: QueueKey | None = None
        """Queues listed after this key are still to come."""
        self._passed: set[AdapterQueue] = set()
        self._due: AdapterQueue | None = None
        """A queue to revisit that belongs before that place."""

    def next(self, *, ready_only: bool = False) -> AdapterQueue | None:
        """Return the next queue; None at the end. ready_only: as WaitingQueue.first_after."""
        due, self._due = self._due, None
        if due is not None:
            self._passed.add(due)
            return due
        while (entry := self._waiting.first_after(self._place, ready_only=ready_only)) is not None:
            listed_key, queue = entry
            if self._waiting.relist(queue) > listed_key:
                continue
            self._place = listed_key
            if queue not in self._passed:
                self._passed.add(queue)
                return queue
        return None

    def revisit(self, queue: AdapterQueue) -> None:
        """Let a queue come again where it belongs now that a sequence of it was taken."""
        if not queue:
            return
        self._passed.remove(queue)
        assert self._place is not None
        if self._waiting.relist(queue) <= self._place:
            self._due = queue


FIRST_SERVICE_NS = 1_000_000_000
"""Assumed service time before the first request has ended."""
MAX_RETRY_SECONDS = 60.0
SMOOTHING = 0.2
"""Weight of the newest service time in the moving average."""


class QueueBound:
    """Limit of the requests that wait for a slot, and the retry time of those beyond it."""

    def __init__(self, max_queue_size: int, max_num_seqs: int) -> None:
        self._max_queue_size = max_queue_size
        self._max_num_seqs = max_num_seqs
        self.num_queued = 0
        """Requests that were accepted, and neither scheduled a first time nor ended."""
        self._service_ns = float(FIRST_SERVICE_NS)

    def refusal(self, num_admissible: Callable[[], int]) -> LoraplexError | None:
        """Return why one more request cannot wait.

        num_admissible: how many of the waiting ones free slots will take. These do not count. It is
        called only for a long queue, because its time grows with the number of adapters that wait.
        """
        if not self._max_queue_size or self.num_queued < self._max_queue_size:
            return None
        num_waiting = self.num_queued - num_admissible()
        if num_waiting < self._max_queue_size:
            return None
        waves = self.num_queued / self._max_num_seqs
        seconds = min(MAX_RETRY_SECONDS, max(1.0, waves * self._service_ns / 1e9))
        return QueueFullError(
            f"{num_waiting} requests wait already; the queue holds {self._max_queue_size}",
            retry_after_seconds=round(seconds, 1),
        )

    def served(self, service_ns: int) -> None:
        """Note the time from a request's first step to its end."""
        self._service_ns += SMOOTHING * (service_ns - self._service_ns)

    def check(self, num_queued: int) -> None:
        assert self.num_queued == num_queued
