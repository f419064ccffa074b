"""State of one adapter in the adapter cache, and the cache's statistics."""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import PageId
from loraplex.core.stats import Durations
from loraplex.memory.eviction import EvictionOrder

_ON_HOST = {Residency.DEVICE, Residency.COPYING, Residency.HOST}
_NONE_YET = Durations()
_FIRST_RETRY_NS = 1_000_000_000
_LAST_RETRY_NS = 60_000_000_000


class LoadGrant(NamedTuple):
    """Permission to load an adapter: its host bytes are reserved."""

    dropped: tuple[AdapterHandle, ...]
    """Host copies that were evicted for it: discard them before the load starts."""


class LoadFailure(NamedTuple):
    """Why an adapter is FAILED, and when a load may begin again."""

    error: ErrorInfo
    retry_at_ns: int


@dataclasses.dataclass(slots=True, eq=False)
class AdapterEntry:
    """State of one adapter. Only the cache changes it."""

    handle: AdapterHandle
    num_bytes: int
    num_pages: int
    residency: Residency = Residency.ABSENT
    has_host_bytes: bool = False
    """Reserved (LOADING) or filled."""
    page_ids: tuple[PageId, ...] = ()
    wants: int = 0
    num_users: int = 0
    """Reference count: running sequences that use it."""
    is_pinned: bool = False
    idle_since_ns: int | None = None
    """When it was first seen idle; None if it was used or moved since."""
    failure: LoadFailure | None = None
    num_failures: int = 0
    """Failures in a row."""
    host_order: EvictionOrder | None = None
    device_order: EvictionOrder | None = None

    @property
    def in_transit(self) -> bool:
        return self.residency in (Residency.LOADING, Residency.COPYING)

    def fail(self, error: ErrorInfo, now_ns: int) -> None:
        """Keep the error, and twice the pause of the failure before."""
        pause_ns = min(_FIRST_RETRY_NS << min(self.num_failures, 32), _LAST_RETRY_NS)
        self.num_failures += 1
        self.failure = LoadFailure(error, now_ns + pause_ns)

    def check(self, *, keeps_host_copy: bool) -> None:
        """Assert what must be true of one entry in its state."""
        residency = self.residency
        assert self.num_users >= 0, self
        assert self.wants >= 0, self
        assert not self.num_users or residency is Residency.DEVICE, "in use, and not on the device"
        assert not self.wants or self.idle_since_ns is None, "idle, and wanted"
        assert (self.failure is not None) == (residency is Residency.FAILED), self
        on_device = residency in (Residency.COPYING, Residency.DEVICE)
        assert len(self.page_ids) == (self.num_pages if on_device else 0), "pages without a copy"
        if residency is Residency.DEVICE:
            assert keeps_host_copy or not self.has_host_bytes, "the host copy was to be dropped"
        else:
            fills_host = residency in (Residency.LOADING, Residency.HOST, Residency.COPYING)
            assert self.has_host_bytes == fills_host, "host bytes without a copy"


@dataclasses.dataclass(slots=True)
class AdapterCounts:
    """Counts for the statistics, named as the fields of AdapterTierStats."""

    device_hits: int = 0
    device_misses: int = 0
    host_hits: int = 0
    host_misses: int = 0
    loads: int = 0
    load_failures: int = 0
    copies: int = 0
    host_evictions: int = 0
    device_evictions: int = 0
    read_times: Durations = _NONE_YET
    copy_times: Durations = _NONE_YET

    def admission(self, found: Collection[Residency]) -> None:
        """Count a new request whose adapters were at `found`."""
        if all(where is Residency.DEVICE for where in found):
            self.device_hits += 1
            return
        self.device_misses += 1
        if all(where in _ON_HOST for where in found):
            self.host_hits += 1
        else:
            self.host_misses += 1

    def load(self, load_ns: int) -> None:
        self.loads += 1
        self.read_times = self.read_times.with_one(load_ns)

    def copy(self, copy_ns: int) -> None:
        self.copies += 1
        self.copy_times = self.copy_times.with_one(copy_ns)

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
