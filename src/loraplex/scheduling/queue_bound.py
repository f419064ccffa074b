"""Limit of the requests that wait for a slot."""

from collections.abc import Callable

from loraplex.core.errors import LoraplexError, QueueFullError

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
