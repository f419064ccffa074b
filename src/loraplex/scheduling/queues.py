"""The sequences that run, and those that wait: both in policy order."""

import bisect
from collections import Counter
from collections.abc import Iterator

from loraplex.core.adapter import AdapterHandle
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.policy import OrderKey


class Lane:
    """Waiting sequences with the same distinct adapters, in policy order; never empty."""

    def __init__(self, handles: tuple[AdapterHandle, ...]) -> None:
        self.handles = handles
        self.ready_since_ns = 0
        """When its adapters were first seen on the device; 0 while they are not."""
        self._entries: list[tuple[OrderKey, ActiveSequence]] = []

    @property
    def head(self) -> ActiveSequence:
        return self._entries[0][1]

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
    """The sequences that wait, in lanes, by the policy order of the lanes' heads.

    Those of one set of adapters wait for the same room. So a plan that cannot give an adapter room
    passes over all its sequences at once, and one lane's wait blocks no other lane.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[AdapterHandle, ...], Lane] = {}
        self._order: list[tuple[OrderKey, Lane]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        """Number of sequences."""
        return self._num_waiting

    def __iter__(self) -> Iterator[ActiveSequence]:
        """All sequences, lane by lane."""
        return (active for lane in self._lanes.values() for active in lane)

    @property
    def num_lanes(self) -> int:
        return len(self._order)

    def lane_at(self, index: int) -> Lane:
        """The lane whose head is the index-th in policy order.

        When a head is taken away, its lane moves behind or vanishes, and the next lane is at
        `index`.
        """
        return self._order[index][1]

    def lanes_with(self, handle: AdapterHandle) -> list[Lane]:
        return [lane for handles, lane in self._lanes.items() if handle in handles]

    def add(self, active: ActiveSequence) -> None:
        handles = active.request.handles
        lane = self._lanes.get(handles)
        if lane is None:
            lane = self._lanes[handles] = Lane(handles)
        else:
            self._unlist(lane)
        lane.add(active)
        bisect.insort(self._order, (lane.head.key, lane))
        self._num_waiting += 1

    def remove(self, active: ActiveSequence) -> None:
        lane = self._lanes[active.request.handles]
        self._unlist(lane)
        lane.remove(active)
        if lane:
            bisect.insort(self._order, (lane.head.key, lane))
        else:
            del self._lanes[lane.handles]
        self._num_waiting -= 1

    def num_by_handle(self) -> Counter[AdapterHandle]:
        """How many sequences wait that need each adapter."""
        counts: Counter[AdapterHandle] = Counter()
        for handles, lane in self._lanes.items():
            counts.update(dict.fromkeys(handles, len(lane)))
        return counts

    def check(self) -> None:
        """Every lane is listed once, by its head, in order."""
        assert len(self._order) == len(self._lanes)
        assert self._num_waiting == sum(len(lane) for lane in self._lanes.values())
        keys = [key for key, _ in self._order]
        assert keys == sorted(keys)
        assert all(len(lane) and lane.head.key == key for key, lane in self._order)

    def _unlist(self, lane: Lane) -> None:
        index = bisect.bisect_left(self._order, (lane.head.key,))
        assert self._order[index][1] is lane
        del self._order[index]


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
