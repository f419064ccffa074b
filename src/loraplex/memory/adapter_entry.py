"""One adapter's state in the adapter cache."""

import dataclasses
from typing import NamedTuple

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import PageId
from loraplex.memory.eviction import EvictionOrder


class LoadFailure(NamedTuple):
    """Why an adapter is FAILED, and when a load may begin again."""

    error: ErrorInfo
    retry_at_ns: int


@dataclasses.dataclass(slots=True, eq=False)
class AdapterEntry:
    """Only the cache writes it."""

    handle: AdapterHandle
    num_bytes: int
    num_pages: int
    residency: Residency = Residency.ABSENT
    has_host_bytes: bool = False
    """Reserved (LOADING) or filled."""
    page_ids: tuple[PageId, ...] = ()
    wants: int = 0
    pins: int = 0
    is_held: bool = False
    idle_since_ns: int | None = None
    """When it was first seen idle; None: it was used or moved since."""
    failure: LoadFailure | None = None
    num_failures: int = 0
    """In a row."""
    host_order: EvictionOrder | None = None
    device_order: EvictionOrder | None = None

    @property
    def in_transit(self) -> bool:
        return self.residency in (Residency.LOADING, Residency.COPYING)

    def check(self, *, keeps_host_copy: bool) -> None:
        """What holds for an entry alone, by its state."""
        residency = self.residency
        assert self.pins >= 0, self
        assert self.wants >= 0, self
        assert not self.pins or residency is Residency.DEVICE, "pinned, and not on the device"
        assert not self.wants or self.idle_since_ns is None, "idle, and wanted"
        assert (self.failure is not None) == (residency is Residency.FAILED), self
        on_device = residency in (Residency.COPYING, Residency.DEVICE)
        assert len(self.page_ids) == (self.num_pages if on_device else 0), "pages without a copy"
        if residency is Residency.DEVICE:
            assert keeps_host_copy or not self.has_host_bytes, "the host copy was to be dropped"
        else:
            fills_host = residency in (Residency.LOADING, Residency.HOST, Residency.COPYING)
            assert self.has_host_bytes == fills_host, "host bytes without a copy"
