"""Eviction of adapters from a full tier: orders, the policies that make them, and the state of each
adapter in the adapter cache, which implies the orders that it is in."""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import PageId
from loraplex.core.stats import Durations

_ON_HOST = {Residency.DEVICE, Residency.COPYING, Residency.HOST}
_NONE_YET = Durations()
_FIRST_RETRY_NS = 1_000_000_000
_LAST_RETRY_NS = 60_000_000_000


class EvictionOrder(Protocol):
    """Ordered set of adapters that may be evicted, each with its size."""

    total_size: int
    """Sum of the sizes."""

    def __len__(self) -> int: ...

    def add(self, handle: AdapterHandle, size: int, num_uses: int = 0, load_ns: int = 0) -> None:
        """Add an adapter that may be evicted, and was used just now.

        num_uses: requests that wanted it so far. load_ns: time of its last load from its file.
        """
        ...

    def remove(self, handle: AdapterHandle) -> None:
        """Remove an adapter that is gone, or must not be evicted now."""
        ...

    def choose(self, size: int) -> list[AdapterHandle]:
        """Return the first adapters whose sizes add up to `size`; all, if they do not."""
        ...

    def sizes(self) -> dict[AdapterHandle, int]:
        """Return the sizes of all adapters, in the order of eviction."""
        ...


class EvictionPolicy(Protocol):
    """Policy of one tier, for all its orders."""

    def new_order(self) -> EvictionOrder: ...


class _Sizes:
    """Sizes of the adapters in an order, by time of joining, with their sum."""

    def __init__(self) -> None:
        self._sizes: dict[AdapterHandle, int] = {}
        self.total_size = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(
        self,
        handle: AdapterHandle,
        size: int,
        num_uses: int = 0,  # noqa: ARG002
        load_ns: int = 0,  # noqa: ARG002
    ) -> None:
        assert handle not in self._sizes, f"adapter {handle} is in the order already"
        self._sizes[handle] = size
        self.total_size += size

    def remove(self, handle: AdapterHandle) -> None:
        self.total_size -= self._sizes.pop(handle)


class LRU(_Sizes):
    """Order with the least recently used first. `choose` and `sizes` are O(n), the rest O(1)."""

    def choose(self, size: int) -> list[AdapterHandle]:
        chosen: list[AdapterHandle] = []
        for handle, handle_size in self._sizes.items():
            if size <= 0:
                break
            chosen.append(handle)
            size -= handle_size
        return chosen

    def sizes(self) -> dict[AdapterHandle, int]:
        return dict(self._sizes)


class LRUPolicy:
    """LRU policy: the place in the order is the time of the last use."""

    def new_order(self) -> EvictionOrder:
        return LRU()


class _Worth(NamedTuple):
    """Heap entry, least worth first."""

    value: float
    joined: int
    """Sequence number: of equal values the earlier one leaves first."""


class GreedyDualPolicy:
    """Policy that evicts the least worth first; worth grows with use and fades with time.

    An adapter that joins an order is worth L + worth(uses, load time, size), and L becomes the
    worth of the last one evicted: so adapters popular long ago lose to those in use now. This
    is GreedyDual-Size with frequency (Cherkasova, HP Labs TR 98-69; Cao and Irani, USITS 1997).
    """

    def __init__(self, worth: Callable[[int, int, int], float]) -> None:
        """worth(uses, load_ns, size): value of keeping an adapter, without fading."""
        self._worth = worth
        self._faded = 0.0
        self._joins = itertools.count()

    def new_order(self) -> EvictionOrder:
        return _LeastWorth(self)

    def worth_now(self, num_uses: int, load_ns: int, size: int) -> _Worth:
        return _Worth(self._faded + self._worth(num_uses, load_ns, size), next(self._joins))

    def evicted(self, worth: _Worth) -> None:
        self._faded = max(self._faded, worth.value)


class _LeastWorth(_Sizes):
    """Order of a GreedyDualPolicy. `choose` is O(n), the rest O(1) but for `sizes`."""

    def __init__(self, policy: GreedyDualPolicy) -> None:
        super().__init__()
        self._policy = policy
        self._worths: dict[AdapterHandle, _Worth] = {}

    def add(self, handle: AdapterHandle, size: int, num_uses: int = 0, load_ns: int = 0) -> None:
        super().add(handle, size)
        self._worths[handle] = self._policy.worth_now(num_uses, load_ns, size)

    def remove(self, handle: AdapterHandle) -> None:
        super().remove(handle)
        del self._worths[handle]

    def choose(self, size: int) -> list[AdapterHandle]:
        if size <= 0:
            return []
        heap = [(worth, handle) for handle, worth in self._worths.items()]
        heapq.heapify(heap)
        chosen: list[AdapterHandle] = []
        while heap and size > 0:
            worth, handle = heapq.heappop(heap)
            self._policy.evicted(worth)
            chosen.append(handle)
            size -= self._sizes[handle]
        return chosen

    def sizes(self) -> dict[AdapterHandle, int]:
        ordered = sorted(self._worths, key=self._worths.__getitem__)
        return {handle: self._sizes[handle] for handle in ordered}


def lfu_policy() -> EvictionPolicy:
    """Evict the least frequently used first, with ageing."""
    return GreedyDualPolicy(lambda uses, _load_ns, _size: uses)


def cost_policy() -> EvictionPolicy:
    """Evict the cheapest to load again first: uses times load time, per unit of size."""
    return GreedyDualPolicy(lambda uses, load_ns, size: uses * load_ns / max(size, 1))


NewEvictionPolicy = Callable[[], EvictionPolicy]

EVICTION_POLICIES: dict[str, NewEvictionPolicy] = {
    "lru": LRUPolicy,
    "lfu": lfu_policy,
    "cost": cost_policy,
}
"""Policies by the name in the settings."""


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
    """Requests that need it and have not ended."""
    num_uses: int = 0
    """Requests that needed it so far."""
    load_ns: int = 0
    """Time of its last load from its file."""
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


class AdapterOrders:
    """Three eviction orders of the host tier and two of the device tier.

    On the host: copies of adapters on the device (their loss costs nothing now), idle adapters,
    wanted adapters. On the device: idle adapters, wanted adapters. Adapters in use, pinned, LOADING
    or COPYING are in none.
    """

    def __init__(self, new_policy: NewEvictionPolicy) -> None:
        host, device = new_policy(), new_policy()
        self._host_redundant = host.new_order()
        self._host_idle = host.new_order()
        self._host_wanted = host.new_order()
        self._device_idle = device.new_order()
        self._device_wanted = device.new_order()

    @property
    def num_redundant(self) -> int:
        """Number of host copies of adapters on the device."""
        return len(self._host_redundant)

    @property
    def has_idle(self) -> bool:
        """Whether `idle` would return any."""
        return len(self._device_idle) + len(self._host_idle) > 0

    def idle(self) -> list[AdapterHandle]:
        """Return the idle adapters of either tier, each once."""
        return list(dict.fromkeys([*self._device_idle.sizes(), *self._host_idle.sizes()]))

    def leaving(self) -> dict[AdapterHandle, int]:
        """Return the pages of what may leave the device, in the order in which it would."""
        return self._device_idle.sizes() | self._device_wanted.sizes()

    def choose(
        self, size: int, *, on_device: bool, may_evict_wanted: bool
    ) -> list[AdapterHandle] | None:
        """Return what to evict to free `size` more of a tier; None if that is impossible.

        size: pages of the device, or bytes of the host.
        """
        idle = [self._device_idle] if on_device else [self._host_redundant, self._host_idle]
        wanted = self._device_wanted if on_device else self._host_wanted
        orders = [*idle, wanted] if may_evict_wanted else idle
        if size > sum(order.total_size for order in orders):
            return None
        victims: list[AdapterHandle] = []
        for order in orders:
            victims += order.choose(size)
            size -= order.total_size
        return victims

    def settle(self, entry: AdapterEntry, *, used: bool = False) -> None:
        """Put an entry into the orders that its state implies.

        It joins an order at the end, and `used` moves it there in its host order. In the device
        order this happens by itself, since an adapter in use is not in it.
        """
        host_order, device_order = self._orders_of(entry)
        if used or host_order is not entry.host_order:
            if entry.host_order is not None:
                entry.host_order.remove(entry.handle)
            if host_order is not None:
                host_order.add(entry.handle, entry.num_bytes, entry.num_uses, entry.load_ns)
            entry.host_order = host_order
        if device_order is not entry.device_order:
            if entry.device_order is not None:
                entry.device_order.remove(entry.handle)
            if device_order is not None:
                device_order.add(entry.handle, entry.num_pages, entry.num_uses, entry.load_ns)
            entry.device_order = device_order

    def check(self, entries: Iterable[AdapterEntry]) -> None:
        """Assert that each entry is in the orders of its state, with its size, and in no other."""
        entries = list(entries)
        for order in (self._host_redundant, self._host_idle, self._host_wanted):
            sizes = {
                entry.handle: entry.num_bytes for entry in entries if entry.host_order is order
            }
            assert order.sizes() == sizes, "host eviction order"
            assert order.total_size == sum(sizes.values())
        for order in (self._device_idle, self._device_wanted):
            sizes = {e.handle: e.num_pages for e in entries if e.device_order is order}
            assert order.sizes() == sizes, "device eviction order"
            assert order.total_size == sum(sizes.values())
        for entry in entries:
            assert (entry.host_order, entry.device_order) == self._orders_of(entry), entry

    def _orders_of(self, entry: AdapterEntry) -> tuple[EvictionOrder | None, EvictionOrder | None]:
        """Return the orders of the host and of the device that an entry's state implies."""
        host: EvictionOrder | None = None
        device: EvictionOrder | None = None
        if entry.residency is Residency.DEVICE:
            host = self._host_redundant
            if not (entry.num_users or entry.is_pinned):
                device = self._device_wanted if entry.wants else self._device_idle
        elif not entry.in_transit:
            host = self._host_wanted if entry.wants else self._host_idle
        return host if entry.has_host_bytes else None, device
