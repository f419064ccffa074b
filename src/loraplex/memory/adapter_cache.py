"""Where each adapter is, and what leaves when a tier is full: host bytes and device pages.

The cache decides; the loader and the runner move bytes, and tell it when they are done. It knows
neither names nor files, and takes the time as an argument.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.core.errors import AdapterTooLargeError, ErrorInfo
from loraplex.core.plan import PageId
from loraplex.core.stats import AdapterTierStats
from loraplex.memory.adapter_counts import AdapterCounts
from loraplex.memory.adapter_entry import AdapterEntry, LoadFailure
from loraplex.memory.adapter_orders import AdapterOrders
from loraplex.memory.eviction import LRUPolicy, NewEvictionPolicy

FIRST_RETRY_NS = 1_000_000_000
LAST_RETRY_NS = 60_000_000_000


class LoadGrant(NamedTuple):
    """The host bytes for a load are reserved."""

    dropped: tuple[AdapterHandle, ...]
    """Host copies that made room: discard them before the load starts."""


class AdapterCache:
    """One table of adapters over two tiers.

        ABSENT -> LOADING -> HOST -> COPYING -> DEVICE
        LOADING, COPYING -> FAILED -> LOADING after a pause
        HOST, DEVICE -> ABSENT, and DEVICE -> HOST, by eviction

    Invariants: pages in use + free = all; host bytes used + free = budget; every page has one
    owner; pinned => DEVICE; LOADING and COPYING are never evicted.

    *Wanted* adapters belong to a request that is not finished; *pinned* ones to a sequence that
    runs. Pinned adapters stay on the device. Wanted ones leave a tier only if the caller allows
    it: it should for the request that is next in line (or two requests could wait for each other's
    room for ever), and not for those behind it (or they would take it away from the next).
    *Held* ones are the operator's: once on the device they stay. Together they leave room for
    whatever else may be asked for.

    With `keeps_host_copy` an adapter on the device keeps its host bytes while the host has room;
    such copies are the first to leave the host, since their loss costs nothing now. Without it
    (the device's memory is the host's) they are given back as the copy ends, and what leaves the
    device is ABSENT: it comes back from its canonical adapter file.

    Where a method returns host copies that were dropped, the caller has the loader discard them
    before it does anything else with the cache.
    """

    def __init__(
        self,
        host_bytes: int,
        num_pages: int,
        *,
        keeps_host_copy: bool,
        new_policy: NewEvictionPolicy = LRUPolicy,
    ) -> None:
        self._host_bytes_total = host_bytes
        self._host_bytes_free = host_bytes
        self._num_pages = num_pages
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._held_pages = 0
        self._num_held = 0
        self._most_pages_together = 0
        """Of the requests so far."""
        self._keeps_host_copy = keeps_host_copy
        self._entries: dict[AdapterHandle, AdapterEntry] = {}
        self._orders = AdapterOrders(new_policy)
        self._num_in: Counter[Residency] = Counter()
        self._counts = AdapterCounts()

    def register(self, handle: AdapterHandle, num_bytes: int, num_pages: int) -> None:
        """Learn of a new adapter: ABSENT.

        Raises AdapterTooLargeError if it could not even fit alone.
        """
        assert handle not in self._entries, f"adapter {handle} is registered already"
        if num_bytes > self._host_bytes_total:
            raise AdapterTooLargeError(
                f"the adapter has {num_bytes} bytes, the whole host cache for adapters "
                f"{self._host_bytes_total}"
            )
        self._require_pages(num_pages, self._held_pages, "the adapter needs")
        self._entries[handle] = AdapterEntry(handle, num_bytes, num_pages)
        self._num_in[Residency.ABSENT] += 1

    def require_fit(self, handles: Iterable[AdapterHandle]) -> None:
        """Raise AdapterTooLargeError if these could never be on the device together."""
        entries = [self._entries[handle] for handle in set(handles)]
        num_pages = sum(entry.num_pages for entry in entries)
        held = self._held_pages - sum(entry.num_pages for entry in entries if entry.is_held)
        self._require_pages(num_pages, held, "the request's adapters together need")
        self._most_pages_together = max(self._most_pages_together, num_pages)

    def hold(self, handle: AdapterHandle) -> None:
        """From now on it does not leave the device; it does not come there by this alone.

        Raises AdapterTooLargeError if the rest of the device could not hold whatever else is
        registered, or was asked for together.
        """
        entry = self._entries[handle]
        if entry.is_held:
            return
        others = (e.num_pages for e in self._entries.values() if not e.is_held and e is not entry)
        needed = max(self._most_pages_together, *others, 0)
        held = self._held_pages + entry.num_pages
        if needed > self._num_pages - held:
            raise AdapterTooLargeError(
                f"with this adapter {held} of {self._num_pages} device pages would be held, and "
                f"other adapters need up to {needed}: release one, or give the device more room"
            )
        entry.is_held = True
        self._num_held += 1
        self._held_pages = held
        self._orders.settle(entry)

    def release(self, handle: AdapterHandle) -> None:
        """Undo `hold`."""
        entry = self._entries[handle]
        if entry.is_held:
            entry.is_held = False
            self._num_held -= 1
            self._held_pages -= entry.num_pages
            self._orders.settle(entry)

    def expire(self, now_ns: int, ttl_ns: int) -> tuple[AdapterHandle, ...]:
        """Evict from both tiers what was idle for `ttl_ns`; the host copies dropped.

        How long is counted from one call to another: call it more often than once in `ttl_ns`.
        """
        dropped: list[AdapterHandle] = []
        for handle in self._orders.idle():
            entry = self._entries[handle]
            if entry.idle_since_ns is None:
                entry.idle_since_ns = now_ns
            elif now_ns - entry.idle_since_ns >= ttl_ns:
                if entry.residency is Residency.DEVICE:
                    self._evict_from_device(entry)
                if entry.has_host_bytes:
                    self._evict_from_host(entry)
                    dropped.append(handle)
        return tuple(dropped)

    def forget(self, handle: AdapterHandle) -> tuple[AdapterHandle, ...] | None:
        """Remove an adapter from the table and from both tiers; the host copies dropped.

        None and no change while it is wanted, pinned, LOADING or COPYING: try again later.
        """
        entry = self._entries[handle]
        if entry.wants or entry.pins or entry.in_transit:
            return None
        self.release(handle)
        dropped = self._drop_host_bytes(entry)
        self._free_device_pages(entry)
        self._become(entry, Residency.ABSENT)
        self._num_in[Residency.ABSENT] -= 1
        del self._entries[handle]
        self._orders.forget(handle)
        return dropped

    def __contains__(self, handle: AdapterHandle) -> bool:
        return handle in self._entries

    def residency(self, handle: AdapterHandle) -> Residency:
        return self._entries[handle].residency

    def failure(self, handle: AdapterHandle) -> LoadFailure | None:
        """Set exactly while it is FAILED."""
        return self._entries[handle].failure

    def page_ids(self, handle: AdapterHandle) -> tuple[PageId, ...]:
        """Its device pages, in the adapter's order; empty unless COPYING or DEVICE."""
        return self._entries[handle].page_ids

    def want(self, handle: AdapterHandle) -> None:
        """A request that needs it was added. In any state."""
        entry = self._entries[handle]
        entry.wants += 1
        entry.idle_since_ns = None
        self._orders.used(handle)
        self._orders.settle(entry)

    def unwant(self, handle: AdapterHandle) -> None:
        """A request that needed it ended: undoes one `want`."""
        entry = self._entries[handle]
        assert entry.wants > 0, f"adapter {handle} is not wanted"
        entry.wants -= 1
        self._orders.settle(entry)

    def begin_load(
        self, handle: AdapterHandle, now_ns: int, *, may_evict_wanted: bool = False
    ) -> LoadGrant | None:
        """ABSENT (or FAILED, when its pause is over) -> LOADING, with host bytes reserved.

        Makes room by dropping host copies of adapters on the device, then idle adapters, then (if
        allowed) wanted ones. None and no change if there is no room now, or the pause is not over.
        """
        entry = self._entries[handle]
        assert entry.residency in (Residency.ABSENT, Residency.FAILED), entry.residency
        if entry.failure is not None and now_ns < entry.failure.retry_at_ns:
            return None
        victims = self._orders.choose_from_host(
            entry.num_bytes - self._host_bytes_free, may_evict_wanted=may_evict_wanted
        )
        if victims is None:
            return None
        for victim in victims:
            self._evict_from_host(self._entries[victim])
        self._host_bytes_free -= entry.num_bytes
        entry.has_host_bytes = True
        entry.failure = None
        entry.idle_since_ns = None
        self._become(entry, Residency.LOADING)
        return LoadGrant(dropped=tuple(victims))

    def loaded(self, handle: AdapterHandle, load_ns: int = 0) -> None:
        """LOADING -> HOST, after a load that took so long."""
        entry = self._entries[handle]
        assert entry.residency is Residency.LOADING, entry.residency
        self._counts.load(load_ns)
        self._orders.loaded(handle, load_ns)
        self._become(entry, Residency.HOST)

    def load_failed(self, handle: AdapterHandle, error: ErrorInfo, now_ns: int) -> None:
        """LOADING -> FAILED; the host bytes are free again. The pause doubles from 1 s to 60 s."""
        entry = self._entries[handle]
        assert entry.residency is Residency.LOADING, entry.residency
        self._counts.load_failures += 1
        self._drop_host_bytes(entry)
        self._fail(entry, error, now_ns)

    def begin_copy(
        self, handle: AdapterHandle, *, may_evict_wanted: bool = False
    ) -> tuple[PageId, ...] | None:
        """HOST -> COPYING: the device pages to copy into.

        Evicts idle adapters, then (if allowed) wanted ones, never pinned ones; nothing is evicted
        unless it then suffices. None and no change if there is no room now. The tuple is empty
        for an adapter of no pages: test for None.
        """
        entry = self._entries[handle]
        assert entry.residency is Residency.HOST, entry.residency
        victims = self._orders.choose_from_device(
            entry.num_pages - len(self._free_pages), may_evict_wanted=may_evict_wanted
        )
        if victims is None:
            return None
        for victim in victims:
            self._evict_from_device(self._entries[victim])
        entry.page_ids = tuple(self._free_pages.pop() for _ in range(entry.num_pages))
        entry.idle_since_ns = None
        self._become(entry, Residency.COPYING)
        return entry.page_ids

    def copied(self, handle: AdapterHandle, copy_ns: int = 0) -> tuple[AdapterHandle, ...]:
        """COPYING -> DEVICE, after a copy that took so long; the host copies dropped: its own,
        unless it is kept."""
        entry = self._entries[handle]
        assert entry.residency is Residency.COPYING, entry.residency
        entry.num_failures = 0
        self._counts.copy(copy_ns)
        dropped = () if self._keeps_host_copy else self._drop_host_bytes(entry)
        self._become(entry, Residency.DEVICE)
        return dropped

    def copy_failed(
        self, handle: AdapterHandle, error: ErrorInfo, now_ns: int
    ) -> tuple[AdapterHandle, ...]:
        """COPYING -> FAILED; pages and host bytes are free again. The host copies dropped."""
        entry = self._entries[handle]
        assert entry.residency is Residency.COPYING, entry.residency
        dropped = self._drop_host_bytes(entry)
        self._free_device_pages(entry)
        self._fail(entry, error, now_ns)
        return dropped

    def pin(self, handle: AdapterHandle) -> None:
        """Hold an adapter on the device, where it must be. Each pin needs an unpin."""
        entry = self._entries[handle]
        assert entry.residency is Residency.DEVICE, entry.residency
        entry.pins += 1
        self._orders.settle(entry, used=True)

    def unpin(self, handle: AdapterHandle) -> None:
        """Undo one pin, when no plan in flight names the adapter for this sequence any more."""
        entry = self._entries[handle]
        assert entry.pins > 0, f"adapter {handle} is not pinned"
        entry.pins -= 1
        self._orders.settle(entry, used=True)

    def count_admission(self, handles: Iterable[AdapterHandle]) -> None:
        """For the statistics: where did a new request find its adapters?"""
        self._counts.admission({self._entries[handle].residency for handle in handles})

    def is_held(self, handle: AdapterHandle) -> bool:
        return self._entries[handle].is_held

    @property
    def has_idle(self) -> bool:
        """Whether either tier holds anything that nobody asks for: what `expire` may evict."""
        return self._orders.has_idle

    def stats(self) -> AdapterTierStats:
        on_host = self._num_in[Residency.HOST] + self._num_in[Residency.COPYING]
        on_host += self._orders.num_redundant
        return AdapterTierStats(
            host_bytes_used=self._host_bytes_total - self._host_bytes_free,
            host_bytes_total=self._host_bytes_total,
            device_pages_used=self._num_pages - len(self._free_pages),
            device_pages_total=self._num_pages,
            num_on_host=on_host,
            num_on_device=self._num_in[Residency.DEVICE],
            num_held=self._num_held,
            **self._counts.fields(),
        )

    def check(self) -> None:
        """Nothing is lost and nothing is counted twice."""
        entries = self._entries.values()
        pages = [page_id for entry in entries for page_id in entry.page_ids]
        assert sorted(pages + self._free_pages) == list(range(self._num_pages)), "pages"
        host_bytes_used = sum(entry.num_bytes for entry in entries if entry.has_host_bytes)
        assert host_bytes_used + self._host_bytes_free == self._host_bytes_total, "host bytes"
        assert self._host_bytes_free >= 0, "host bytes"
        assert +self._num_in == Counter(entry.residency for entry in entries), "counts"
        for entry in entries:
            entry.check(keeps_host_copy=self._keeps_host_copy)
        assert self._num_held == sum(entry.is_held for entry in entries), "held adapters"
        held = sum(entry.num_pages for entry in entries if entry.is_held)
        assert held == self._held_pages, "held pages"
        self._orders.check(entries)

    def _require_pages(self, num_pages: int, held: int, who_needs: str) -> None:
        if num_pages > self._num_pages - held:
            raise AdapterTooLargeError(
                f"{who_needs} {num_pages} device pages, the whole device cache for adapters has "
                f"{self._num_pages}" + (f", and {held} of them are held for others" if held else "")
            )

    def _become(self, entry: AdapterEntry, residency: Residency) -> None:
        self._num_in[entry.residency] -= 1
        self._num_in[residency] += 1
        entry.residency = residency
        self._orders.settle(entry)

    def _evict_from_host(self, entry: AdapterEntry) -> None:
        self._counts.host_evictions += 1
        self._drop_host_bytes(entry)
        if entry.residency is Residency.HOST:
            self._become(entry, Residency.ABSENT)
        else:
            self._orders.settle(entry)

    def _evict_from_device(self, entry: AdapterEntry) -> None:
        self._counts.device_evictions += 1
        self._free_device_pages(entry)
        self._become(entry, Residency.HOST if entry.has_host_bytes else Residency.ABSENT)

    def _drop_host_bytes(self, entry: AdapterEntry) -> tuple[AdapterHandle, ...]:
        if not entry.has_host_bytes:
            return ()
        entry.has_host_bytes = False
        self._host_bytes_free += entry.num_bytes
        return (entry.handle,)

    def _free_device_pages(self, entry: AdapterEntry) -> None:
        self._free_pages.extend(entry.page_ids)
        entry.page_ids = ()

    def _fail(self, entry: AdapterEntry, error: ErrorInfo, now_ns: int) -> None:
        pause_ns = min(FIRST_RETRY_NS << min(entry.num_failures, 32), LAST_RETRY_NS)
        entry.num_failures += 1
        entry.failure = LoadFailure(error, now_ns + pause_ns)
        self._become(entry, Residency.FAILED)
