"""How much was charged in the last minute."""

import dataclasses
from collections import deque

WINDOW_NS = 60 * 10**9
SLOT_NS = 10**9
"""Charges of one second are kept as one, and stay for up to a second longer than a window: memory
does not grow with the rate, and the amount that it returns is never too small."""


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """What was charged in one second. A charge is corrected in the slot that it was made in."""

    start_ns: int
    amount: int = 0
    is_live: bool = True
    """Still a part of the window."""


class SlidingWindow:
    """Invariant: the total is the sum of the live slots; a live slot began less than
    WINDOW_NS + SLOT_NS ago.

    So if every charge leaves the total within a limit, any window's charges are within it. Times
    must not run backwards.
    """

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque()
        self._total = 0

    def total(self, now_ns: int) -> int:
        """Return at least what was charged in the last WINDOW_NS."""
        self._expire(now_ns)
        return self._total

    def charge(self, now_ns: int, amount: int) -> Slot:
        """Count an amount, at least 0, as of now. Give the slot back to correct it."""
        self._expire(now_ns)
        start_ns = now_ns - now_ns % SLOT_NS
        if not self._slots or self._slots[-1].start_ns != start_ns:
            self._slots.append(Slot(start_ns))
        slot = self._slots[-1]
        slot.amount += amount
        self._total += amount
        return slot

    def correct(self, slot: Slot, difference: int) -> None:
        """Add a difference, mostly below 0, to an earlier charge that is still in the window."""
        if slot.is_live:
            slot.amount += difference
            self._total += difference

    def seconds_until(self, now_ns: int, amount: int, limit: int) -> float:
        """When an amount, at most the limit, will fit if nothing else is charged; 0.0: it does."""
        self._expire(now_ns)
        excess = self._total + amount - limit
        for slot in self._slots:
            if excess <= 0:
                break
            excess -= slot.amount
            if excess <= 0:
                return (_end_of(slot) - now_ns) / 1e9
        return 0.0

    def _expire(self, now_ns: int) -> None:
        while self._slots and _end_of(self._slots[0]) <= now_ns:
            slot = self._slots.popleft()
            slot.is_live = False
            self._total -= slot.amount


def _end_of(slot: Slot) -> int:
    """When its last charge is a window old."""
    return slot.start_ns + SLOT_NS + WINDOW_NS
