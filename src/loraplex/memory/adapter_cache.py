"""Cache of adapters in two tiers, host bytes and device pages: where each is, and what is evicted.

The cache decides; the loader and the runner move the bytes and report when they are done. It knows
neither names nor files, and takes the time as an argument.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.core.byte_sizes import enough_bytes, readable_bytes
from loraplex.core.errors import AdapterLoadError, AdapterTooLargeError, ErrorInfo
from loraplex.core.plan import PageId
from loraplex.core.stats import AdapterTierStats
from loraplex.memory.eviction import (
    AdapterCounts,
    AdapterEntry,
    AdapterOrders,
    LoadFailure,
    LRUPolicy,
    NewEvictionPolicy,
)

_ON_HOST = {Residency.DEVICE, Residency.COPYING, Residency.HOST}


class AdapterCache:
    """One table of adapters over two tiers.

        ABSENT -> LOADING -> HOST -> COPYING -> DEVICE
        LOADING, COPYING -> FAILED -> LOADING after a pause
        HOST, DEVICE -> ABSENT, and DEVICE -> HOST, by eviction

    Invariants: pages in use + free = all; host bytes used + free = budget; every page has one
    owner; in use => DEVICE; LOADING and COPYING are never evicted.

    *Wanted* adapters belong to a request that has not finished. Adapters *in use* belong to running
    sequences, which are counted; they stay on the device. A wanted adapter leaves a tier only if
    the caller allows it: allow it for the next request in line (otherwise two requests could wait
    for each other's memory for ever), and not for later ones (they would take memory from the
    next). *Pinned* adapters are the operator's choice: once on the device they stay. Together they
    leave enough pages for any other registered adapter.

    With `keeps_host_copy` an adapter on the device keeps its host bytes while the host has free
    memory; these copies are the first to leave the host, since their loss costs nothing now.
    Without it (the device's memory is the host's) they are freed when the copy ends, and an adapter
    that leaves the device is ABSENT: it is loaded again from its canonical adapter file.

    Where a method returns host copies that were dropped, the caller must have the loader discard
    them before it calls the cache again.
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
        self._pinned_pages = 0
        self._num_pinned = 0
        self._max_pages_together = 0
        """Maximum over the requests so far."""
        self._keeps_host_copy = keeps_host_copy
        self._entries: dict[AdapterHandle, AdapterEntry] = {}
        self._orders = AdapterOrders(new_policy)
        self._num_in: Counter[Residency] = Counter()
        self._moved: set[AdapterHandle] = set()
        self._counts = AdapterCounts()

    def register(self, handle: AdapterHandle, num_bytes: int, num_pages: int) -> None:
        """Add a new adapter, which is ABSENT.

        Raises AdapterTooLargeError if it would not fit even alone.
        """
        assert handle not in self._entries, f"adapter {handle} is registered already"
        if num_bytes > self._host_bytes_total:
            raise AdapterTooLargeError(
                f"the adapter takes {readable_bytes(num_bytes)}, and the whole host cache for "
                f"adapters has {readable_bytes(self._host_bytes_total)}: raise lora_host_bytes to "
                f"{enough_bytes(num_bytes)} or more"
            )
        self._require_pages(num_pages, self._pinned_pages, "the adapter needs")
        self._entries[handle] = AdapterEntry(handle, num_bytes, num_pages)
        self._num_in[Residency.ABSENT] += 1

    def require_fit(self, handles: Iterable[AdapterHandle]) -> None:
        """Raise AdapterTooLargeError if these could never be on the device together."""
        entries = [self._entries[handle] for handle in set(handles)]
        num_pages = sum(entry.num_pages for entry in entries)
        pinned = self._pinned_pages - sum(entry.num_pages for entry in entries if entry.is_pinned)
        self._require_pages(num_pages, pinned, "the request's adapters together need")
        self._max_pages_together = max(self._max_pages_together, num_pages)

    def pin(self, handle: AdapterHandle) -> None:
        """Keep an adapter on the device once it is there. This alone does not bring it there.

        Raises AdapterTooLargeError if the remaining pages could not hold every other registered
        adapter, or every set of adapters that one request has named so far.
        """
        entry = self._entries[handle]
        if entry.is_pinned:
            return
        others = (e.num_pages for e in self._entries.values() if not e.is_pinned and e is not entry)
        needed = max(self._max_pages_together, *others, 0)
        pinned = self._pinned_pages + entry.num_pages
        if needed > self._num_pages - pinned:
            raise AdapterTooLargeError(
                f"with this adapter {pinned} of {self._num_pages} device pages would be pinned, "
                f"and other adapters need up to {needed}: unpin one, or raise lora_device_bytes"
            )
        entry.is_pinned = True
        self._num_pinned += 1
        self._pinned_pages = pinned
        self._orders.settle(entry)

    def unpin(self, handle: AdapterHandle) -> None:
        """Undo `pin`."""
        entry = self._entries[handle]
        if entry.is_pinned:
            entry.is_pinned = False
            self._num_pinned -= 1
            self._pinned_pages -= entry.num_pages
            self._orders.settle(entry)

    def expire(self, now_ns: int, ttl_ns: int) -> tuple[AdapterHandle, ...]:
        """Evict adapters that were idle for `ttl_ns` from both tiers; return dropped host copies.

        Idle time is measured between calls: call this several times per `ttl_ns`.
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
        """Remove an adapter from the table and both tiers; return the host copies dropped.

        Returns None and changes nothing while it is wanted, in use, LOADING or COPYING: try again
        later.
        """
        entry = self._entries[handle]
        if entry.wants or entry.num_users or entry.in_transit:
            return None
        self.unpin(handle)
        dropped = self._drop_host_bytes(entry)
        self._free_device_pages(entry)
        self._enter(entry, Residency.ABSENT)
        self._num_in[Residency.ABSENT] -= 1
        del self._entries[handle]
        return dropped

    def __contains__(self, handle: AdapterHandle) -> bool:
        return handle in self._entries

    def residency(self, handle: AdapterHandle) -> Residency:
        return self._entries[handle].residency

    def failure(self, handle: AdapterHandle) -> LoadFailure | None:
        """Return the failure of a FAILED adapter, None in any other state."""
        return self._entries[handle].failure

    def refusal(self, handles: Iterable[AdapterHandle], now_ns: int) -> AdapterLoadError | None:
        """Return why a request cannot be accepted now: one of its loads failed a moment ago."""
        for handle in handles:
            failure = self._entries[handle].failure
            if failure is not None and failure.retry_at_ns > now_ns:
                return AdapterLoadError(
                    f"the adapter could not be loaded: {failure.error.message}",
                    retry_after_seconds=(failure.retry_at_ns - now_ns) / 1e9,
                )
        return None

    def page_ids(self, handle: AdapterHandle) -> tuple[PageId, ...]:
        """Return its device pages in the adapter's order; empty unless COPYING or DEVICE."""
        return self._entries[handle].page_ids

    def want(self, handles: Collection[AdapterHandle]) -> None:
        """Count a new request that needs these adapters, in any state; statistics have them."""
        for handle in handles:
            entry = self._entries[handle]
            entry.wants += 1
            entry.num_uses += 1
            entry.idle_since_ns = None
            self._orders.settle(entry)
        found = {self._entries[handle].residency for handle in handles}
        if found == {Residency.DEVICE}:
            self._counts.device_hits += 1
        elif found:
            self._counts.device_misses += 1
            if found <= _ON_HOST:
                self._counts.host_hits += 1
            else:
                self._counts.host_misses += 1

    def unwant(self, handles: Iterable[AdapterHandle]) -> None:
        """Undo one `want`: a request that needed the adapters ended."""
        for handle in handles:
            entry = self._entries[handle]
            assert entry.wants > 0, f"adapter {handle} is not wanted"
            entry.wants -= 1
            self._orders.settle(entry)

    def fits_free_memory(self, handle: AdapterHandle) -> bool:
        """Whether the adapter can go on to the device without an eviction from either tier."""
        entry = self._entries[handle]
        has_host = entry.has_host_bytes or entry.num_bytes <= self._host_bytes_free
        return has_host and entry.num_pages <= len(self._free_pages) + len(entry.page_ids)

    def begin_load(
        self, handle: AdapterHandle, now_ns: int, *, may_evict_wanted: bool = False
    ) -> tuple[AdapterHandle, ...] | None:
        """Move ABSENT (or FAILED after its pause) -> LOADING, and reserve the host bytes.

        Frees bytes by dropping host copies of adapters on the device, then idle adapters, then (if
        allowed) wanted ones; returns the host copies dropped. Returns None and changes nothing if
        that does not suffice, or if the pause is not over: test for None.
        """
        entry = self._entries[handle]
        assert entry.residency in (Residency.ABSENT, Residency.FAILED), entry.residency
        if entry.failure is not None and now_ns < entry.failure.retry_at_ns:
            return None
        needed = entry.num_bytes - self._host_bytes_free
        victims = self._orders.choose(needed, on_device=False, may_evict_wanted=may_evict_wanted)
        if victims is None:
            return None
        for victim in victims:
            self._evict_from_host(self._entries[victim])
        self._host_bytes_free -= entry.num_bytes
        entry.has_host_bytes = True
        entry.failure = None
        entry.idle_since_ns = None
        self._enter(entry, Residency.LOADING)
        return tuple(victims)

    def loaded(self, handle: AdapterHandle, load_ns: int = 0) -> None:
        """Move LOADING -> HOST after a load of `load_ns`."""
        entry = self._entries[handle]
        assert entry.residency is Residency.LOADING, entry.residency
        self._counts.loads += 1
        self._counts.read_times = self._counts.read_times.with_one(load_ns)
        entry.load_ns = load_ns
        self._enter(entry, Residency.HOST)

    def load_failed(self, handle: AdapterHandle, error: ErrorInfo, now_ns: int) -> None:
        """Move LOADING -> FAILED and free the host bytes. The pause doubles from 1 s to 60 s."""
        entry = self._entries[handle]
        assert entry.residency is Residency.LOADING, entry.residency
        self._counts.load_failures += 1
        self._drop_host_bytes(entry)
        self._fail(entry, error, now_ns)

    def begin_copy(
        self, handle: AdapterHandle, *, may_evict_wanted: bool = False
    ) -> tuple[PageId, ...] | None:
        """Move HOST -> COPYING and return the device pages to copy into.

        Evicts idle adapters, then (if allowed) wanted ones, never those in use or pinned. Returns
        None and changes nothing if that does not suffice. The tuple is empty for an adapter of no
        pages: test for None.
        """
        entry = self._entries[handle]
        assert entry.residency is Residency.HOST, entry.residency
        needed = entry.num_pages - len(self._free_pages)
        victims = self._orders.choose(needed, on_device=True, may_evict_wanted=may_evict_wanted)
        if victims is None:
            return None
        for victim in victims:
            self._evict_from_device(self._entries[victim])
        entry.page_ids = tuple(self._free_pages.pop() for _ in range(entry.num_pages))
        entry.idle_since_ns = None
        self._enter(entry, Residency.COPYING)
        return entry.page_ids

    def copied(self, handle: AdapterHandle, copy_ns: int = 0) -> tuple[AdapterHandle, ...]:
        """Move COPYING -> DEVICE after a copy of `copy_ns`; return the host copies dropped."""
        entry = self._entries[handle]
        assert entry.residency is Residency.COPYING, entry.residency
        entry.num_failures = 0
        self._counts.copies += 1
        self._counts.copy_times = self._counts.copy_times.with_one(copy_ns)
        dropped = () if self._keeps_host_copy else self._drop_host_bytes(entry)
        self._enter(entry, Residency.DEVICE)
        return dropped

    def copy_failed(
        self, handle: AdapterHandle, error: ErrorInfo, now_ns: int
    ) -> tuple[AdapterHandle, ...]:
        """Move COPYING -> FAILED, free pages and host bytes; return the host copies dropped."""
        entry = self._entries[handle]
        assert entry.residency is Residency.COPYING, entry.residency
        dropped = self._drop_host_bytes(entry)
        self._free_device_pages(entry)
        self._fail(entry, error, now_ns)
        return dropped

    def acquire(self, handle: AdapterHandle) -> None:
        """Count one more user of an adapter on the device. Each `acquire` needs a `release`."""
        entry = self._entries[handle]
        assert entry.residency is Residency.DEVICE, entry.residency
        entry.num_users += 1
        self._orders.settle(entry, used=True)

    def release(self, handle: AdapterHandle) -> None:
        """Undo one `acquire`, once no plan in flight names the adapter for this sequence."""
        entry = self._entries[handle]
        assert entry.num_users > 0, f"adapter {handle} is not in use"
        entry.num_users -= 1
        self._orders.settle(entry, used=True)

    def is_pinned(self, handle: AdapterHandle) -> bool:
        return self._entries[handle].is_pinned

    def leaving(self) -> dict[AdapterHandle, int]:
        """Return the pages of what may be evicted from the device, in the order of eviction."""
        return self._orders.leaving()

    def num_users(self, handle: AdapterHandle) -> int:
        """Return how often an adapter was acquired and not yet released."""
        return self._entries[handle].num_users

    def users(self) -> Counter[AdapterHandle]:
        """Return the number of users of each adapter that is in use."""
        return Counter({e.handle: e.num_users for e in self._entries.values() if e.num_users})

    def num_in(self, residency: Residency) -> int:
        """Return how many adapters are in a state."""
        return self._num_in[residency]

    def take_moved(self) -> set[AdapterHandle]:
        """Return the adapters that came to the device or left it since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    @property
    def has_idle(self) -> bool:
        """Whether either tier holds an idle adapter, which `expire` may evict."""
        return self._orders.has_idle

    @property
    def num_pages_used(self) -> int:
        return self._num_pages - len(self._free_pages)

    def stats(self) -> AdapterTierStats:
        on_host = self._num_in[Residency.HOST] + self._num_in[Residency.COPYING]
        on_host += self._orders.num_redundant
        return AdapterTierStats(
            host_bytes_used=self._host_bytes_total - self._host_bytes_free,
            host_bytes_total=self._host_bytes_total,
            device_pages_used=self.num_pages_used,
            device_pages_total=self._num_pages,
            num_on_host=on_host,
            num_on_device=self._num_in[Residency.DEVICE],
            num_held=self._num_pinned,
            **{name: getattr(self._counts, name) for name in AdapterCounts.__slots__},
        )

    def check(self) -> None:
        """Assert that nothing is lost and nothing is counted twice."""
        entries = self._entries.values()
        pages = [page_id for entry in entries for page_id in entry.page_ids]
        assert sorted(pages + self._free_pages) == list(range(self._num_pages)), "pages"
        host_bytes_used = sum(entry.num_bytes for entry in entries if entry.has_host_bytes)
        assert host_bytes_used + self._host_bytes_free == self._host_bytes_total, "host bytes"
        assert self._host_bytes_free >= 0, "host bytes"
        assert +self._num_in == Counter(entry.residency for entry in entries), "counts"
        for entry in entries:
            entry.check(keeps_host_copy=self._keeps_host_copy)
        assert self._num_pinned == sum(entry.is_pinned for entry in entries), "pinned adapters"
        assert self._pinned_pages == sum(e.num_pages for e in entries if e.is_pinned), "pinned"
        self._orders.check(entries)

    def _require_pages(self, num_pages: int, pinned: int, need: str) -> None:
        if num_pages > self._num_pages - pinned:
            others = f", of which others have pinned {pinned}: unpin one, or" if pinned else ":"
            raise AdapterTooLargeError(
                f"{need} {num_pages} device pages, the whole device cache for adapters has "
                f"{self._num_pages}{others} raise lora_device_bytes"
            )

    def _enter(self, entry: AdapterEntry, residency: Residency) -> None:
        if Residency.DEVICE in (entry.residency, residency):
            self._moved.add(entry.handle)
        self._num_in[entry.residency] -= 1
        self._num_in[residency] += 1
        entry.residency = residency
        self._orders.settle(entry)

    def _evict_from_host(self, entry: AdapterEntry) -> None:
        self._counts.host_evictions += 1
        self._drop_host_bytes(entry)
        if entry.residency is Residency.HOST:
            self._enter(entry, Residency.ABSENT)
        else:
            self._orders.settle(entry)

    def _evict_from_device(self, entry: AdapterEntry) -> None:
        self._counts.device_evictions += 1
        self._free_device_pages(entry)
        self._enter(entry, Residency.HOST if entry.has_host_bytes else Residency.ABSENT)

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
        entry.fail(error, now_ns)
        self._enter(entry, Residency.FAILED)
