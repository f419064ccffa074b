"""Which requests make up the batch, where batches are formed and run to their ends (V1)."""

from collections.abc import Iterable

from loraplex.core.sequence import SequenceStatus
from loraplex.scheduling.active import ActiveRequest, ActiveSequence


class StaticBatch:
    """A batch is formed in one plan, as soon as the adapters are there that its requests need.

    Then only its own sequences take slots, until its last request has ended: those that were
    preempted, and those that waited for their request's prompt.
    """

    def __init__(self) -> None:
        self._requests: dict[ActiveRequest, None] = {}
        self._due_since_ns: int | None = None

    @property
    def is_running(self) -> bool:
        return any(request.num_unfinished for request in self._requests)

    def due_since(self, now_ns: int) -> int:
        """When the next batch could first have been formed. The adapters of requests that came
        later are not waited for."""
        if self._due_since_ns is None:
            self._due_since_ns = now_ns
        return self._due_since_ns

    def form(self, requests: Iterable[ActiveRequest]) -> None:
        self._requests = dict.fromkeys(requests)
        if self._requests:
            self._due_since_ns = None

    def waiting(self) -> list[ActiveSequence]:
        """Its sequences that want a slot, in policy order."""
        return sorted(
            (
                active
                for request in self._requests
                for active in request.sequences
                if active.sequence.status is SequenceStatus.WAITING
                and active not in request.held_back
            ),
            key=lambda active: active.key,
        )
