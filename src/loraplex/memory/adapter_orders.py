"""Eviction orders of the two tiers. Each adapter is in the orders that its state implies."""

from collections.abc import Iterable, Sequence

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.memory.adapter_entry import AdapterEntry
from loraplex.memory.eviction import EvictionOrder, NewEvictionPolicy


class AdapterOrders:
    """Three eviction orders of the host tier and two of the device tier.

    On the host: copies of adapters on the device (their loss costs nothing now), idle adapters,
    wanted adapters. On the device: idle adapters, wanted adapters. Adapters in use, pinned, LOADING
    or COPYING are in none.
    """

    def __init__(self, new_policy: NewEvictionPolicy) -> None:
        self._host = new_policy()
        self._host_redundant = self._host.new_order()
        self._host_idle = self._host.new_order()
        self._host_wanted = self._host.new_order()
        self._device = new_policy()
        self._device_idle = self._device.new_order()
        self._device_wanted = self._device.new_order()

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

    def choose_from_host(
        self, num_bytes: int, *, may_evict_wanted: bool
    ) -> list[AdapterHandle] | None:
        """Return what to evict to free `num_bytes` more; None if that is impossible."""
        orders = [self._host_redundant, self._host_idle]
        return _choose([*orders, self._host_wanted] if may_evict_wanted else orders, num_bytes)

    def choose_from_device(
        self, num_pages: int, *, may_evict_wanted: bool
    ) -> list[AdapterHandle] | None:
        """Return what to evict to free `num_pages` more; None if that is impossible."""
        orders = [self._device_idle]
        return _choose([*orders, self._device_wanted] if may_evict_wanted else orders, num_pages)

    def used(self, handle: AdapterHandle) -> None:
        """Note that a request wants the adapter."""
        self._host.used(handle)
        self._device.used(handle)

    def loaded(self, handle: AdapterHandle, load_ns: int) -> None:
        self._host.loaded(handle, load_ns)
        self._device.loaded(handle, load_ns)

    def forget(self, handle: AdapterHandle) -> None:
        """Forget an adapter, which must be in no order."""
        self._host.forget(handle)
        self._device.forget(handle)

    def settle(self, entry: AdapterEntry, *, used: bool = False) -> None:
        """Put an entry into the orders that its state implies.

        It joins an order at the end, and `used` moves it there in its host order. In the device
        order this happens by itself, since an adapter in use is not in it.
        """
        host_order = self._host_order_of(entry)
        if used or host_order is not entry.host_order:
            if entry.host_order is not None:
                entry.host_order.remove(entry.handle)
            if host_order is not None:
                host_order.add(entry.handle, entry.num_bytes)
            entry.host_order = host_order
        device_order = self._device_order_of(entry)
        if device_order is not entry.device_order:
            if entry.device_order is not None:
                entry.device_order.remove(entry.handle)
            if device_order is not None:
                device_order.add(entry.handle, entry.num_pages)
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
            assert entry.host_order is self._host_order_of(entry), entry
            assert entry.device_order is self._device_order_of(entry), entry

    def _host_order_of(self, entry: AdapterEntry) -> EvictionOrder | None:
        if not entry.has_host_bytes or entry.in_transit:
            return None
        if entry.residency is Residency.DEVICE:
            return self._host_redundant
        return self._host_wanted if entry.wants else self._host_idle

    def _device_order_of(self, entry: AdapterEntry) -> EvictionOrder | None:
        if entry.residency is not Residency.DEVICE or entry.num_users or entry.is_pinned:
            return None
        return self._device_wanted if entry.wants else self._device_idle


def _choose(orders: Sequence[EvictionOrder], size: int) -> list[AdapterHandle] | None:
    """Return what to evict to free `size` more, order by order; None if that is impossible."""
    if size > sum(order.total_size for order in orders):
        return None
    victims: list[AdapterHandle] = []
    for order in orders:
        victims += order.choose(size)
        size -= order.total_size
    return victims
