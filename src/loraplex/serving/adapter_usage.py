"""Requests and tokens of each tenant by adapter, counted since the start of the server.

One event loop calls it. The least recently used adapters beyond a maximum are counted together.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

MAX_ADAPTERS: Final = 1000
"""Maximum number of adapters that are counted separately for one tenant."""
MAX_SERVER_ADAPTERS: Final = 10_000
"""The same for all tenants together."""


class UsedAdapter(NamedTuple):
    """An adapter, or the base model itself, which has neither owner nor name."""

    model: str
    owner: str = ""
    """Tenant that has the adapter."""
    name: str = ""


class UsageCount(msgspec.Struct):
    """Use of one adapter by requests that ended."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_used: int | None = None
    """Time at which the newest of the requests ended, in Unix seconds; null: none did."""

    def add(self, more: "UsageCount") -> None:
        self.requests += more.requests
        self.errors += more.errors
        self.prompt_tokens += more.prompt_tokens
        self.output_tokens += more.output_tokens
        self.last_used = max(self.last_used or 0, more.last_used or 0) or None


NO_USE: Final = UsageCount()


class _Counts:
    """Counts by adapter, the least recently used adapter first."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self.by_adapter: dict[UsedAdapter, UsageCount] = {}
        self.other = UsageCount()

    def add(self, adapter: UsedAdapter, more: UsageCount) -> None:
        count = self.by_adapter.pop(adapter, None) or UsageCount()
        count.add(more)
        self.by_adapter[adapter] = count
        if len(self.by_adapter) > self._max_adapters:
            oldest = next(iter(self.by_adapter))
            self.other.add(self.by_adapter.pop(oldest))


class AdapterUsage:
    """Use of adapters by tenant. A request of several adapters counts for each of them."""

    def __init__(
        self,
        unix_seconds: Callable[[], float] = time.time,
        max_adapters: int = MAX_ADAPTERS,
        max_server_adapters: int = MAX_SERVER_ADAPTERS,
    ) -> None:
        self._unix_seconds = unix_seconds
        self._max_adapters = max_adapters
        self._tenants: dict[str, _Counts] = {}
        self._server = _Counts(max_server_adapters)
        self.since: Final = int(unix_seconds())
        """Time of the start, in Unix seconds."""

    def count(
        self,
        tenant: str,
        adapters: Iterable[UsedAdapter],
        *,
        num_prompt_tokens: int = 0,
        num_output_tokens: int = 0,
        is_error: bool = False,
    ) -> None:
        """Count a request that has ended."""
        one = UsageCount(
            requests=1,
            errors=int(is_error),
            prompt_tokens=num_prompt_tokens,
            output_tokens=num_output_tokens,
            last_used=int(self._unix_seconds()),
        )
        if tenant not in self._tenants:
            self._tenants[tenant] = _Counts(self._max_adapters)
        for adapter in adapters:
            self._tenants[tenant].add(adapter, one)
            self._server.add(adapter, one)

    @property
    def tenants(self) -> list[str]:
        """Return the tenants that have counts, in order."""
        return sorted(self._tenants)

    def of_tenant(self, tenant: str) -> Mapping[UsedAdapter, UsageCount]:
        """Return a copy of a tenant's counts by adapter."""
        counts = self._tenants.get(tenant)
        return {} if counts is None else dict(counts.by_adapter)

    def of_server(self) -> Mapping[UsedAdapter, UsageCount]:
        """Return a copy of the counts of all tenants together, by adapter."""
        return dict(self._server.by_adapter)

    def others_of(self, tenant: str) -> UsageCount:
        """Return the joint counts of the tenant's adapters that are not counted separately."""
        counts = self._tenants.get(tenant)
        return NO_USE if counts is None else counts.other
