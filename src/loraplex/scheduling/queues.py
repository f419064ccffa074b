"""The sequences that run, in policy order, and those that wait, in lanes."""

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from loraplex.core.adapter import AdapterHandle
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.policy import OrderKey, ShareKey

_Index = TypeVar("_Index", ShareKey, AdapterHandle)

LaneKey = tuple[int, float, OrderKey]
"""(first element of the head's policy key, counter of its share, policy key)."""


class Lane:
    """Waiting sequences of one share with the same distinct adapters, in policy order; never empty
    while it is in a queue."""

    def __init__(self, share: ShareKey, handles: tuple[AdapterHandle, ...]) -> None:
        self.share = share
        self.handles = handles
        self.ready_since_ns = 0
        """When its adapters were first seen on the device; 0 while they are not."""
        self._entries: list[tuple[OrderKey, ActiveSequence]] = []

    @property
    def is_ready(self) -> bool:
        return self.ready_since_ns > 0

    @property
    def head(self) -> ActiveSequence:
        return self._entries[0][1]

    def shortest(self, num_looked_at: int) -> ActiveSequence:
        """Of its first sequences, the one with the fewest tokens."""
        entries = itertools.islice(self._entries, num_looked_at)
        return min(entries, key=lambda entry: entry[1].sequence.num_tokens)[1]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ActiveSequence]:
        return (active for _, active in self._entries)

    def add(self, active: ActiveSequence) -> None:
        bisect.insort(self._entries, (active.key, active))

    def remove(self, active: ActiveSequence) -> None:
        index = bisect.bisect_left(self._entries, (active.key,))
        assert self._entries[index][1] is active
        del self._entries[index]


class WaitingQueue:
    """The sequences that wait, in lanes: by priority, counter of the share, then policy order of
    the lanes' heads.

    Those of one set of adapters wait for the same room. So a plan that cannot give an adapter room
    passes over all its sequences at once, and one lane's wait blocks no other lane.
    """

    def __init__(
        self,
        counter: Callable[[ShareKey], float] = lambda _share: 0.0,
        resident_lead: float = 0.0,
    ) -> None:
        """counter: what a share was served so far; it only grows.

        resident_lead: so much less counts for a lane whose adapters are on the device.
        """
        self._counter = counter
        self._resident_lead = resident_lead
        self._lanes: dict[tuple[ShareKey, tuple[AdapterHandle, ...]], Lane] = {}
        self._by_share: dict[ShareKey, dict[Lane, None]] = {}
        self._by_handle: dict[AdapterHandle, dict[Lane, None]] = {}
        self._key_of: dict[Lane, LaneKey] = {}
        """By which each lane is listed. Its key may have grown meanwhile: a scan that comes to the
        lane lists it anew, so what nobody looks at costs nothing."""
        self._order: list[tuple[LaneKey, Lane]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        """Number of sequences."""
        return self._num_waiting

    def __iter__(self) -> Iterator[ActiveSequence]:
        """All sequences, lane by lane."""
        return (active for lane in self._lanes.values() for active in lane)

    @property
    def shares(self) -> Collection[ShareKey]:
        """Those that have a sequence waiting."""
        return self._by_share.keys()

    @property
    def lanes(self) -> Collection[Lane]:
        """In no order."""
        return self._lanes.values()

    def scan(self) -> "LaneScan":
        """One pass over all lanes in order."""
        return LaneScan(self)

    def first_behind(self, key: LaneKey | None) -> tuple[LaneKey, Lane] | None:
        """The first lane that is listed behind a key, and its own key; None: behind nothing."""
        index = 0
        if key is not None:
            index = bisect.bisect_left(self._order, (key,))
            index += index < len(self._order) and self._order[index][0] == key
        return self._order[index] if index < len(self._order) else None

    def relist(self, lane: Lane) -> LaneKey:
        """List it where it belongs now; its key."""
        key = self._key(lane)
        if key != self._key_of[lane]:
            self._unlist(lane)
            self._list(lane, key)
        return key

    def lanes_with(self, handle: AdapterHandle) -> list[Lane]:
        return list(self._by_handle.get(handle, ()))

    def note_ready(self, lane: Lane, since_ns: int | None) -> None:
        """The adapters of a lane are on the device, as one sees at since_ns; None: they are not."""
        was_ready = lane.is_ready
        lane.ready_since_ns = 0 if since_ns is None else lane.ready_since_ns or since_ns
        if lane.is_ready and not was_ready:
            self.relist(lane)

    def add(self, active: ActiveSequence) -> None:
        share, handles = active.request.share, active.request.handles
        lane = self._lanes.get((share, handles))
        if lane is None:
            lane = self._lanes[share, handles] = Lane(share, handles)
            self._by_share.setdefault(share, {})[lane] = None
            for handle in handles:
                self._by_handle.setdefault(handle, {})[lane] = None
        else:
            self._unlist(lane)
        lane.add(active)
        self._list(lane, self._key(lane))
        self._num_waiting += 1

    def remove(self, active: ActiveSequence) -> None:
        lane = self._lanes[active.request.share, active.request.handles]
        self._unlist(lane)
        lane.remove(active)
        if lane:
            self._list(lane, self._key(lane))
        else:
            self._forget(lane)
        self._num_waiting -= 1

    def num_by_handle(self) -> Counter[AdapterHandle]:
        """How many sequences wait that need each adapter."""
        counts: Counter[AdapterHandle] = Counter()
        for lane in self._lanes.values():
            for handle in lane.handles:
                counts[handle] += len(lane)
        return counts

    def check(self) -> None:
        """Every lane is listed once, in order, by its head; none behind where it belongs."""
        assert len(self._order) == len(self._lanes) == len(self._key_of)
        assert self._num_waiting == sum(len(lane) for lane in self._lanes.values())
        keys = [key for key, _ in self._order]
        assert keys == sorted(keys)
        assert all(self._key_of[lane] == key for key, lane in self._order)
        for (share, handles), lane in self._lanes.items():
            assert (share, handles) == (lane.share, lane.handles)
            assert len(lane), "an empty lane"
            assert lane in self._by_share[share]
            assert all(lane in self._by_handle[handle] for handle in handles)
            assert self._key_of[lane] <= self._key(lane)
            assert self._key_of[lane][2] == lane.head.key
        assert sum(len(lanes) for lanes in self._by_share.values()) == len(self._lanes)
        num_handles = sum(len(lane.handles) for lane in self._lanes.values())
        assert sum(len(lanes) for lanes in self._by_handle.values()) == num_handles

    def _key(self, lane: Lane) -> LaneKey:
        key = lane.head.key
        lead = self._resident_lead if lane.is_ready else 0.0
        return (key[0], self._counter(lane.share) - lead, key)

    def _list(self, lane: Lane, key: LaneKey) -> None:
        self._key_of[lane] = key
        bisect.insort(self._order, (key, lane))

    def _unlist(self, lane: Lane) -> None:
        index = bisect.bisect_left(self._order, (self._key_of.pop(lane),))
        assert self._order[index][1] is lane
        del self._order[index]

    def _forget(self, lane: Lane) -> None:
        del self._lanes[lane.share, lane.handles]
        _remove(self._by_share, lane.share, lane)
        for handle in lane.handles:
            _remove(self._by_handle, handle, lane)


def _remove(lanes: dict[_Index, dict[Lane, None]], index: _Index, lane: Lane) -> None:
    """And the index with its last lane."""
    del lanes[index][lane]
    if not lanes[index]:
        del lanes[index]


class LaneScan:
    """One pass over the lanes of a queue, in which sequences are taken out: each lane comes once,
    and again whenever `again` says so.

    In a pass a share's counter only grows, when a sequence of it is taken: then its lanes move
    back, also those that have not come yet.
    """

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._place: LaneKey | None = None
        """What is listed behind it is still to come."""
        self._passed: set[Lane] = set()
        self._due: Lane | None = None
        """It comes again, and belongs before that place."""

    def next(self) -> Lane | None:
        """None at the end."""
        due, self._due = self._due, None
        if due is not None:
            self._passed.add(due)
            return due
        while (entry := self._queue.first_behind(self._place)) is not None:
            listed_key, lane = entry
            if self._queue.relist(lane) > listed_key:
                continue
            self._place = listed_key
            if lane not in self._passed:
                self._passed.add(lane)
                return lane
        return None

    def again(self, lane: Lane) -> None:
        """Its head was taken, or another one: it has its next turn where it belongs now."""
        if not lane:
            return
        self._passed.remove(lane)
        assert self._place is not None
        if self._queue.relist(lane) <= self._place:
            self._due = lane


class RunningSet:
    """The sequences that hold a slot."""

    def __init__(self) -> None:
        self._entries: list[tuple[OrderKey, ActiveSequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ActiveSequence]:
        return (active for _, active in self._entries)

    @property
    def last(self) -> ActiveSequence:
        """The first to be preempted."""
        return self._entries[-1][1]

    def add(self, active: ActiveSequence) -> None:
        bisect.insort(self._entries, (active.key, active))

    def remove(self, active: ActiveSequence) -> None:
        index = bisect.bisect_left(self._entries, (active.key,))
        assert self._entries[index][1] is active
        del self._entries[index]
