"""Until when requests must have ended."""

import heapq
from collections.abc import Callable

from loraplex.core.errors import DeadlineExceededError
from loraplex.core.request import RequestId
from loraplex.scheduling.active import ActiveRequest

NUM_ENDED_KEPT = 64
"""Entries of ended requests that are kept before one looks for them."""


class Deadlines:
    """The requests that have a deadline, the first one first.

    Entries of requests that ended before are dropped when they are met, or are too many.
    """

    def __init__(self, find: Callable[[RequestId], ActiveRequest | None]) -> None:
        """find: a request that has not ended; None if it has."""
        self._find = find
        self._entries: list[tuple[int, RequestId]] = []
        self._max_entries = NUM_ENDED_KEPT

    def __len__(self) -> int:
        """Entries, also of requests that ended."""
        return len(self._entries)

    def add(self, request: ActiveRequest) -> None:
        """No change if it has none."""
        deadline_ns = request.group.request.deadline_ns
        if deadline_ns is None:
            return
        heapq.heappush(self._entries, (deadline_ns, request.request_id))
        if len(self._entries) > self._max_entries:
            self._entries = [entry for entry in self._entries if self._find(entry[1]) is not None]
            heapq.heapify(self._entries)
            self._max_entries = 2 * len(self._entries) + NUM_ENDED_KEPT

    def next_ns(self) -> int | None:
        """The first one; None: there is none."""
        while self._entries and self._find(self._entries[0][1]) is None:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def take_due(self, now_ns: int) -> list[ActiveRequest]:
        """Those that should have ended by now. They are forgotten."""
        due: list[ActiveRequest] = []
        while self._entries and self._entries[0][0] <= now_ns:
            request = self._find(heapq.heappop(self._entries)[1])
            if request is not None:
                due.append(request)
        return due


def deadline_error(request: ActiveRequest) -> DeadlineExceededError:
    deadline_ns = request.group.request.deadline_ns
    assert deadline_ns is not None, "it has no deadline"
    seconds = (deadline_ns - request.arrival_ns) / 1e9
    num_tokens = sum(sequence.num_output_tokens for sequence in request.group.sequences)
    return DeadlineExceededError(
        f"the request did not end within its {seconds:g} seconds; it had {num_tokens} new tokens"
    )
