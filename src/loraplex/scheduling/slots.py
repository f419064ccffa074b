"""Which of the runner's slots are taken, and which ones it has yet to clear."""

import heapq

from loraplex.core.plan import Slot


class SlotPool:
    """A fixed number of slots; the lowest free one is taken, so that rows stay close together.

    A released slot can be taken again at once: in a plan rows leave before rows join. The runner
    is told of it by the next plan that is launched.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._removed: dict[Slot, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Slot | None:
        return heapq.heappop(self._free) if self._free else None

    def release(self, slot: Slot) -> None:
        heapq.heappush(self._free, slot)
        self._removed[slot] = None

    def rejoin(self, slot: Slot) -> None:
        """The slot stays taken, but its row leaves: another one joins in its place."""
        self._removed[slot] = None

    def take_removed(self) -> tuple[Slot, ...]:
        """The slots whose rows left since the last call: StepPlan.removed."""
        removed = tuple(self._removed)
        self._removed.clear()
        return removed

    def remove_again(self, slots: tuple[Slot, ...]) -> None:
        """The plan that named these as removed failed: name them in the next one, too."""
        self._removed.update(dict.fromkeys(slots))

    def check(self, taken: list[Slot]) -> None:
        """Free and taken slots are all slots, each once."""
        assert sorted([*self._free, *taken]) == list(range(self._num_slots)), "a slot is lost"
