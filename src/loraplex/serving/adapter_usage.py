"""Requests and tokens of each tenant by adapter, counted since the start of the server, and by
minute in the last hour.

One event loop calls it. The least recently used adapters beyond a maximum are counted together.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

MAX_ADAPTERS: Final = 1000
"""Maximum number of adapters that are counted separately for one tenant."""
MAX_SERVER_ADAPTERS: Final = 10_000
"""The same for all tenants together."""
NUM_MINUTES: Final = 60
MAX_IN_MINUTE: Final = 1000
"""Maximum number of adapters, counted by tenant, that a minute has."""
_MINUTE: Final = 60
"""Seconds."""


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


class UsageMinute(msgspec.Struct, kw_only=True):
    """Requests that ended in one minute."""

    t: int
    """Begin of the minute, in Unix seconds."""
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, more: UsageCount) -> None:
        self.requests += more.requests
        self.errors += more.errors
        self.prompt_tokens += more.prompt_tokens
        self.output_tokens += more.output_tokens


class _Minute(NamedTuple):
    number: int
    """Minutes since 1970."""
    counts: dict[tuple[str, UsedAdapter], UsageCount]
    """Counts by tenant and adapter."""


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
        self._minutes: deque[_Minute] = deque(maxlen=NUM_MINUTES)
        """Minutes with requests, the newest last."""
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
            self._count_in_minute((tenant, adapter), one)

    def _count_in_minute(self, key: tuple[str, UsedAdapter], one: UsageCount) -> None:
        number = int(self._unix_seconds()) // _MINUTE
        # The wall clock may go back: then the newest minute has the request.
        if not self._minutes or number > self._minutes[-1].number:
            self._minutes.append(_Minute(number, {}))
        counts = self._minutes[-1].counts
        if key in counts or len(counts) < MAX_IN_MINUTE:
            counts.setdefault(key, UsageCount()).add(one)

    def minutes(
        self, tenants: Collection[str], is_wanted: Callable[[UsedAdapter], bool]
    ) -> list[UsageMinute]:
        """Return the minutes of the last hour, with the present one, of these tenants' adapters.

        Of a minute with more than MAX_IN_MINUTE adapters the first ones count.
        """
        last = int(self._unix_seconds()) // _MINUTE
        if self._minutes:
            last = max(last, self._minutes[-1].number)
        first = last - NUM_MINUTES + 1
        series = [UsageMinute(t=number * _MINUTE) for number in range(first, last + 1)]
        wanted = frozenset(tenants)
        for minute in self._minutes:
            if minute.number < first:
                continue
            for (tenant, used), count in minute.counts.items():
                if tenant in wanted and is_wanted(used):
                    series[minute.number - first].add(count)
        return series

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
