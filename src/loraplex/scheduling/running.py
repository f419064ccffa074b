"""Sequences that have a slot of the runner, and the slots."""

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator

from loraplex.core.plan import Slot
from loraplex.scheduling.request import OrderKey, Sequence, ShareKey


class RunningSet:
    """The sequences that have a slot, in scheduling order."""

    def __init__(self) -> None:
        self._entries: list[tuple[OrderKey, Sequence]] = []
        self._num_by_share: Counter[ShareKey] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    @property
    def last(self) -> Sequence:
        """The first sequence to be preempted."""
        return self._entries[-1][1]

    def num_of(self, share: ShareKey) -> int:
        """Return the number of sequences of a fair share."""
        return self._num_by_share[share]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._entries, (sequence.key, sequence))
        self._num_by_share[sequence.request.share] += 1

    def remove(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self._entries, (sequence.key,))
        assert self._entries[index][1] is sequence
        del self._entries[index]
        share = sequence.request.share
        self._num_by_share[share] -= 1
        if not self._num_by_share[share]:
            del self._num_by_share[share]


class SlotPool:
    """A fixed number of slots. The lowest free one is taken, so that rows stay close together.

    A released slot can be taken again at once, because in a plan rows leave before rows join. The
    next plan that is launched names the released slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._removed: dict[Slot, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Slot | None:
        """Take a slot; None if none is free."""
        return heapq.heappop(self._free) if self._free else None

    def release(self, slot: Slot) -> None:
        """Free a slot."""
        heapq.heappush(self._free, slot)
        self._removed[slot] = None

    def rejoin(self, slot: Slot) -> None:
        """Keep the slot taken while its row leaves and another one joins in its place."""
        self._removed[slot] = None

    def take_removed(self) -> tuple[Slot, ...]:
        """Return the slots whose rows left since the last call, for StepPlan.removed."""
        removed = tuple(self._removed)
        self._removed.clear()
        return removed

    def remove_again(self, slots: tuple[Slot, ...]) -> None:
        """Name these slots in the next plan again, because the plan that named them failed."""
        self._removed.update(dict.fromkeys(slots))

    def check(self, taken: list[Slot]) -> None:
        """Assert that free and taken slots are all slots, each once."""
        assert sorted([*self._free, *taken]) == list(range(self._num_slots)), "a slot is lost"
