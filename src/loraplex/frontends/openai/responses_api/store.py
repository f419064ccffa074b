"""What is kept of responses: in memory, for a while, for each tenant by itself."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from loraplex.core.errors import ResponseNotFoundError
from loraplex.frontends.openai.context import StoreLimits


class StoredResponse(NamedTuple):
    """All as JSON, so that its size is known and nothing of it is shared."""

    response: bytes
    given: bytes
    """Conversation that it belongs to, including earlier turns, as a JSON list."""
    output: bytes
    """A list: its own items."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.given) + len(self.output)


class _StoredEntry(NamedTuple):
    stored: StoredResponse
    expires: float


class ResponseStore:
    """Stored responses of one server. Not thread-safe: one event loop calls it."""

    def __init__(
        self, limits: StoreLimits | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """now: seconds."""
        self._limits = limits or StoreLimits()
        self._now = now
        self._tenants: dict[str, _Shelf] = {}

    @property
    def is_open(self) -> bool:
        return self._limits.max_responses > 0

    def keep(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Add a response. Older ones are removed; one larger than the store is not kept."""
        if not self.is_open or stored.num_bytes > self._limits.max_bytes:
            return
        shelf = self._tenants.setdefault(tenant, _Shelf())
        shelf.add(response_id, _StoredEntry(stored, self._now() + self._limits.max_seconds))
        self._clear()
        while (
            len(shelf.entries) > self._limits.max_responses
            or shelf.num_bytes > self._limits.max_bytes
        ):
            shelf.remove(next(iter(shelf.entries)))

    def get(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Raises ResponseNotFoundError; another tenant's is as unknown as any."""
        self._clear()
        shelf = self._tenants.get(tenant)
        entry = None if shelf is None else shelf.entries.get(response_id)
        if entry is None:
            raise ResponseNotFoundError(
                f"there is no response {response_id[:80]!r}: it was sent with store: false, was "
                "deleted, or is no longer kept; send the whole conversation as input",
                param=param,
            )
        return entry.stored

    def remove(self, tenant: str, response_id: str) -> None:
        """Raises ResponseNotFoundError."""
        self.get(tenant, response_id)
        self._tenants[tenant].remove(response_id)

    def _clear(self) -> None:
        """Forget what is too old, and tenants that have nothing."""
        now = self._now()
        for tenant, shelf in list(self._tenants.items()):
            while shelf.entries and shelf.oldest.expires <= now:
                shelf.remove(next(iter(shelf.entries)))
            if not shelf.entries:
                del self._tenants[tenant]


class _Shelf:
    """One tenant's, oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _StoredEntry] = OrderedDict()
        self.num_bytes = 0

    @property
    def oldest(self) -> _StoredEntry:
        return next(iter(self.entries.values()))

    def add(self, response_id: str, entry: _StoredEntry) -> None:
        self.entries[response_id] = entry
        self.num_bytes += entry.stored.num_bytes

    def remove(self, response_id: str) -> None:
        self.num_bytes -= self.entries.pop(response_id).stored.num_bytes
