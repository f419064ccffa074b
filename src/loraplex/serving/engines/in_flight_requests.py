"""In-flight requests of one model, and the order in which a new engine receives them.

Whatever was in a step when an engine crashed may have crashed it (and any request, if there was no
step). Such suspects are given to the
next engine first, one at a time: the next one when the one before has ended, or has got beyond the
place where the engine crashed. All others wait meanwhile, so that a second crash has one cause.
"""

import itertools
from collections.abc import Collection, Iterator

from loraplex.core.request import RequestBatch, RequestId
from loraplex.serving.engines.in_flight_request import CRASH_BLAME, KILL_BLAME, InFlightRequest


class InFlightRequests:
    """All requests from submission to last output."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, InFlightRequest] = {}
        self._unsent: dict[RequestId, InFlightRequest] = {}
        self._timed: dict[RequestId, InFlightRequest] = {}
        self._on_probation: InFlightRequest | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[InFlightRequest]:
        """Iterate in the order of submission; requests may be removed meanwhile."""
        return iter(tuple(self._requests.values()))

    def find(self, request_id: RequestId) -> InFlightRequest | None:
        return self._requests.get(request_id)

    @property
    def unsent(self) -> Collection[InFlightRequest]:
        """Those that the running engine does not know, or that wait for one."""
        return tuple(self._unsent.values())

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def timed(self) -> Collection[InFlightRequest]:
        """Those that have a deadline."""
        return tuple(self._timed.values())

    def add(self, request: InFlightRequest) -> None:
        self._requests[request.request_id] = self._unsent[request.request_id] = request
        if request.deadline_ns is not None:
            self._timed[request.request_id] = request

    def remove(self, request: InFlightRequest) -> None:
        """It ended."""
        del self._requests[request.request_id]
        self._unsent.pop(request.request_id, None)
        self._timed.pop(request.request_id, None)
        if request is self._on_probation:
            self._on_probation = None

    def take_due(self) -> list[InFlightRequest]:
        """Return the requests that the running engine is to receive now.

        Those of one batch are next to each other.
        """
        if self._on_probation is not None and self._on_probation.is_suspect:
            return []
        self._on_probation = next((r for r in self._unsent.values() if r.is_suspect), None)
        due = [self._on_probation] if self._on_probation else self._unsent_batches()
        for request in due:
            del self._unsent[request.request_id]
            request.is_sent = True
        return due

    def _unsent_batches(self) -> list[InFlightRequest]:
        batches: dict[RequestBatch | RequestId, list[InFlightRequest]] = {}
        for request in self._unsent.values():
            if not request.waits_for_others:
                batches.setdefault(request.batch or request.request_id, []).append(request)
        return list(itertools.chain.from_iterable(batches.values()))

    def note_step(self, request_ids: Collection[RequestId]) -> None:
        """A step with rows of these requests ended well."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.note_step()

    def lose_engine(self, in_flight: Collection[RequestId], *, was_killed: bool) -> None:
        """The engine is dead; `in_flight` were in its steps. All are to be sent to the next one."""
        blame = KILL_BLAME if was_killed or not in_flight else CRASH_BLAME
        for request in self._requests.values():
            if request.is_sent:
                may_be_cause = not in_flight or request.request_id in in_flight
                request.lose_engine(blame if may_be_cause else 0)
        self._on_probation = None
        self._unsent = dict(self._requests)
