"""Deadlines of requests."""

import heapq
from collections.abc import Callable

from loraplex.core.errors import DeadlineExceededError
from loraplex.core.request import RequestId
from loraplex.scheduling.request import Request

MAX_ENDED_ENTRIES = 64
"""Number of entries above which those of ended requests are sought and removed."""


class Deadlines:
    """The requests that have a deadline, the earliest first.

    Entries of requests that have ended are dropped when they are met, or when there are too many.
    """

    def __init__(self, find: Callable[[RequestId], Request | None]) -> None:
        """find: return a request; None if it has ended."""
        self._find = find
        self._entries: list[tuple[int, RequestId]] = []
        self._max_entries = MAX_ENDED_ENTRIES

    def __len__(self) -> int:
        """Return the number of entries, including those of ended requests."""
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Add a request's deadline, if it has one."""
        deadline_ns = request.engine_request.deadline_ns
        if deadline_ns is None:
            return
        heapq.heappush(self._entries, (deadline_ns, request.request_id))
        if len(self._entries) > self._max_entries:
            self._entries = [entry for entry in self._entries if self._find(entry[1]) is not None]
            heapq.heapify(self._entries)
            # Twice the live entries: the search costs a constant per added deadline.
            self._max_entries = 2 * len(self._entries) + MAX_ENDED_ENTRIES

    def next_ns(self) -> int | None:
        """Return the earliest deadline; None if there is none."""
        while self._entries and self._find(self._entries[0][1]) is None:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def take_due(self, now_ns: int) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        due: list[Request] = []
        while self._entries and self._entries[0][0] <= now_ns:
            request = self._find(heapq.heappop(self._entries)[1])
            if request is not None:
                due.append(request)
        return due


def deadline_error(request: Request) -> DeadlineExceededError:
    """Return the error of a request whose deadline has passed."""
    deadline_ns = request.engine_request.deadline_ns
    assert deadline_ns is not None, "it has no deadline"
    seconds = (deadline_ns - request.arrival_ns) / 1e9
    num_tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
    return DeadlineExceededError(
        f"the request did not end within its {seconds:g} seconds; it had {num_tokens} new tokens"
    )
