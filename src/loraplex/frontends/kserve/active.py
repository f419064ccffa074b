"""Requests in work, so that another request can stop them.

A stop request names its victim by the client's request id; without an id it means the requests of
its own stream.
"""

import asyncio
import dataclasses
from collections import defaultdict

from loraplex.core.errors import InvalidRequestError


class StreamScope:
    """One bidirectional stream of a client. Only its identity matters."""


@dataclasses.dataclass(eq=False, slots=True)
class ActiveRequest:
    tenant: str
    client_request_id: str
    scope: StreamScope | None
    stopped: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set: the request ends now, with what it has."""


class ActiveRequests:
    """Ids may repeat: a stop request then stops every request of its id."""

    def __init__(self) -> None:
        self._by_id: defaultdict[tuple[str, str], set[ActiveRequest]] = defaultdict(set)

    def add(self, request: ActiveRequest) -> None:
        self._by_id[request.tenant, request.client_request_id].add(request)

    def remove(self, request: ActiveRequest) -> None:
        """Idempotent."""
        key = (request.tenant, request.client_request_id)
        if key in self._by_id:
            self._by_id[key].discard(request)
            if not self._by_id[key]:
                del self._by_id[key]

    def __len__(self) -> int:
        return sum(map(len, self._by_id.values()))

    def stop(self, tenant: str, client_request_id: str, scope: StreamScope | None) -> None:
        """Stop the requests that a stop request means. None of them is fine: it has ended.

        Raises InvalidRequestError for a stop request without an id that came alone.
        """
        if client_request_id:
            victims = self._by_id.get((tenant, client_request_id), set())
        elif scope is not None:
            victims = {
                request
                for requests in self._by_id.values()
                for request in requests
                if request.scope is scope
            }
        else:
            raise InvalidRequestError(
                "Trying to stop a request but request ID is not provided; send the id of the "
                "request to stop, or send the stop request over the same stream",
                param="id",
            )
        for request in victims:
            request.stopped.set()
