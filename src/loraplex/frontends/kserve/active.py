"""Registry of in-flight inference requests, so that another request can stop them.

A stop request has the client's id of that request; without an id it means the requests
of its own stream.
"""

from loraplex.core.errors import InvalidRequestError
from loraplex.frontends.kserve.merge import Stop


class StreamScope:
    """One bidirectional stream of a client. Only its identity matters."""


class ActiveRequest(Stop):
    """Once it is stopped, it ends with what it has."""

    def __init__(
        self, others: "ActiveRequests", key: tuple[str, str], scope: StreamScope | None
    ) -> None:
        """key: its tenant, and the client's request id."""
        super().__init__()
        self.key = key
        self.scope = scope
        self._others = others

    def end(self) -> None:
        """Nothing is left to stop. Idempotent."""
        self._others.remove(self)


class ActiveRequests:
    """Ids may repeat: a stop request then stops every request of its id."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], set[ActiveRequest]] = {}

    def begin(
        self, tenant: str, client_request_id: str, scope: StreamScope | None
    ) -> ActiveRequest:
        request = ActiveRequest(self, (tenant, client_request_id), scope)
        self._by_key.setdefault(request.key, set()).add(request)
        return request

    def remove(self, request: ActiveRequest) -> None:
        """Idempotent."""
        requests = self._by_key.get(request.key)
        if requests is not None:
            requests.discard(request)
            if not requests:
                del self._by_key[request.key]

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def stop(self, tenant: str, client_request_id: str, scope: StreamScope | None) -> None:
        """Stop the requests that a stop request means. None of them is fine: it has ended.

        Raises InvalidRequestError for a stop request without an id that came alone.
        """
        if client_request_id:
            victims = self._by_key.get((tenant, client_request_id), set())
        elif scope is not None:
            victims = {
                request
                for requests in self._by_key.values()
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
            request.set()
