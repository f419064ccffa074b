"""Decides which adapters the cache loads and copies next, for the requests that wait.

It starts loads and copies; it moves no bytes and knows no files.
"""

import enum
from collections import Counter
from typing import Protocol

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import AdapterCopy
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.scheduling.request import Request

LONGEST_EXPIRY_PAUSE_NS = 1_000_000_000


class HostLoads(Protocol):
    """Loader of host copies, by handle. Both calls return at once."""

    def start_load(self, handle: AdapterHandle) -> None:
        """Begin to read an adapter; AdapterCache.loaded or load_failed reports the end."""
        ...

    def discard(self, handle: AdapterHandle) -> None: ...


class AdapterReadiness(enum.Enum):
    READY = enum.auto()
    """All adapters are on the device."""
    COMING = enum.auto()
    """A load or a copy has begun."""
    BLOCKED = enum.auto()
    """A tier is full of adapters that may not be evicted now."""
    PASSED = enum.auto()
    """Its adapters could load, but an aged request needs the memory."""


class CacheFiller:
    """Worker of the AdapterCache: fills it with the adapters that requests need.

    No request waits for another request's adapters, with one exception: the bound on being passed
    over. Let X be the first request in policy order whose adapters have lacked memory for
    `aging_ns`. From then on no later request is admitted that needs an adapter which neither X nor
    a running sequence uses; after twice `aging_ns`, none that needs an adapter which X does not
    use. So X waits at most 2 * aging_ns, and then for the sequences that run at that moment (not
    counting requests of higher priority). The base model needs no adapter and never waits for this.

    Of the waiting requests only the first may evict adapters that others want: so one of them
    always gets its memory, and later ones cannot take it away again.
    """

    def __init__(
        self, cache: AdapterCache, host: HostLoads, aging_ns: int, ttl_ns: int | None = None
    ) -> None:
        """ttl_ns: idle time after which an adapter leaves both tiers; None: it never does."""
        self.cache = cache
        self._host = host
        self._aging_ns = aging_ns
        self._ttl_ns = ttl_ns
        self._next_expiry_ns = 0
        self._copies_to_start: list[AdapterCopy] = []
        self._preloads: dict[AdapterHandle, None] = {}

    @property
    def num_loading(self) -> int:
        return self.cache.num_in(Residency.LOADING)

    @property
    def num_copying(self) -> int:
        return self.cache.num_in(Residency.COPYING)

    def acquire(self, handles: tuple[AdapterHandle, ...]) -> None:
        """Count a sequence that needs these adapters and takes a slot."""
        for handle in handles:
            self.cache.acquire(handle)

    def release(self, handles: tuple[AdapterHandle, ...]) -> None:
        for handle in handles:
            self.cache.release(handle)

    def preload(self, handle: AdapterHandle) -> None:
        """Bring an adapter to the device if it is pinned, or if free memory takes it.

        The preload ends if it fails or would evict another adapter, unless the adapter is pinned.
        """
        self._preloads[handle] = None

    def pin(self, handle: AdapterHandle) -> None:
        """Bring an adapter to the device and keep it there. Raises as AdapterCache.pin."""
        self.cache.pin(handle)
        self.preload(handle)

    def unpin(self, handle: AdapterHandle) -> None:
        """Undo `pin`."""
        self.cache.unpin(handle)

    def expire(self, now_ns: int) -> None:
        """Evict adapters that were idle for too long; checks at most twice per `ttl_ns`."""
        if self._ttl_ns is not None and now_ns >= self._next_expiry_ns:
            self._next_expiry_ns = now_ns + min(self._ttl_ns // 2, LONGEST_EXPIRY_PAUSE_NS)
            self._discard(self.cache.expire(now_ns, self._ttl_ns))

    def next_expiry_ns(self) -> int | None:
        """Return when to call `expire` again; None while no adapter is idle, or without a TTL."""
        if self._ttl_ns is None or not self.cache.has_idle:
            return None
        return self._next_expiry_ns

    @property
    def running(self) -> Counter[AdapterHandle]:
        """Number of sequences with a slot, by adapter."""
        return self.cache.users()

    def num_running(self, handle: AdapterHandle) -> int:
        """Return the number of sequences with a slot that use an adapter."""
        return self.cache.num_users(handle)

    def is_preloading(self, handle: AdapterHandle) -> bool:
        """Whether a preload was requested and has not ended."""
        return handle in self._preloads

    def is_on_device(self, handle: AdapterHandle) -> bool:
        return self.cache.residency(handle) is Residency.DEVICE

    def scan(self, now_ns: int) -> "AdapterScan":
        return AdapterScan(self, now_ns)

    def take_copies_to_start(self) -> tuple[AdapterCopy, ...]:
        """Take the copies that the next launched plan starts."""
        copies = tuple(self._copies_to_start)
        self._copies_to_start.clear()
        return copies

    def start_again(self, copies: tuple[AdapterCopy, ...]) -> None:
        """Put the copies of a failed plan into the next one, with the same pages."""
        self._copies_to_start.extend(copies)

    def load_failed(self, handle: AdapterHandle, error: ErrorInfo, now_ns: int) -> None:
        self._forget_preload(handle)
        self.cache.load_failed(handle, error, now_ns)

    def copied(self, handle: AdapterHandle, copy_ns: int) -> None:
        if not self._is_copying(handle):
            return  # reported twice: a plan that failed named the copy, and so did the next one
        self._preloads.pop(handle, None)
        self._discard(self.cache.copied(handle, copy_ns))

    def copy_failed(self, handle: AdapterHandle, error: ErrorInfo, now_ns: int) -> None:
        if not self._is_copying(handle):
            return
        self._forget_preload(handle)
        self._discard(self.cache.copy_failed(handle, error, now_ns))

    def check(self, num_users: Counter[AdapterHandle]) -> None:
        """Assert that the cache is whole; num_users: sequences with a slot, by adapter."""
        assert num_users == self.cache.users(), f"{self.cache.users()}, expected {num_users}"
        self.cache.check()

    def is_aged(self, request: Request, now_ns: int) -> bool:
        """Whether a request has been passed over for longer than the bound."""
        since_ns = request.adapters_blocked_since_ns
        return since_ns is not None and now_ns - since_ns >= self._aging_ns

    def may_pass(self, aged: Request, handles: tuple[int, ...], now_ns: int) -> bool:
        """Whether a request that needs `handles` may be admitted before the aged one."""
        others = [handle for handle in handles if handle not in aged.handles]
        assert aged.adapters_blocked_since_ns is not None
        if now_ns - aged.adapters_blocked_since_ns >= 2 * self._aging_ns:
            return not others
        return all(self.cache.num_users(handle) for handle in others)

    def advance(
        self, handles: tuple[AdapterHandle, ...], now_ns: int, *, is_next: bool
    ) -> AdapterReadiness:
        """Begin the loads and copies that can begin now for one request's adapters."""
        on_device = [handle for handle in handles if self.is_on_device(handle)]
        if len(on_device) == len(handles):
            return AdapterReadiness.READY
        # They must not be evicted for each other.
        for handle in on_device:
            self.cache.acquire(handle)
        has_memory = True
        for handle in handles:
            # Once one lacks memory, the others must not evict wanted adapters: with a host tier
            # that holds only one of two, they would evict each other for ever.
            moved = self._begin(handle, now_ns, may_evict_wanted=is_next and has_memory)
            has_memory = has_memory and moved
        for handle in on_device:
            self.cache.release(handle)
        return AdapterReadiness.COMING if has_memory else AdapterReadiness.BLOCKED

    def _begin(self, handle: AdapterHandle, now_ns: int, *, may_evict_wanted: bool) -> bool:
        """Begin the next load or copy of an adapter; False if memory is lacking."""
        match self.cache.residency(handle):
            case Residency.ABSENT | Residency.FAILED:
                return self._begin_load(handle, now_ns, may_evict_wanted)
            case Residency.HOST:
                return self._begin_copy(handle, may_evict_wanted)
            case _:
                return True

    def _begin_load(self, handle: AdapterHandle, now_ns: int, may_evict_wanted: bool) -> bool:
        failure = self.cache.failure(handle)
        if failure is not None and failure.retry_at_ns > now_ns:
            return True
        dropped = self.cache.begin_load(handle, now_ns, may_evict_wanted=may_evict_wanted)
        if dropped is None:
            return False
        self._discard(dropped)
        self._host.start_load(handle)
        return True

    def _begin_copy(self, handle: AdapterHandle, may_evict_wanted: bool) -> bool:
        page_ids = self.cache.begin_copy(handle, may_evict_wanted=may_evict_wanted)
        if page_ids is None:
            return False
        self._copies_to_start.append(AdapterCopy(handle, page_ids))
        return True

    def _forget_preload(self, handle: AdapterHandle) -> None:
        """End a preload that failed; that of a pinned adapter is tried again after the pause."""
        if not self.cache.is_pinned(handle):
            self._preloads.pop(handle, None)

    def _discard(self, handles: tuple[AdapterHandle, ...]) -> None:
        for handle in handles:
            self._host.discard(handle)

    def _is_copying(self, handle: AdapterHandle) -> bool:
        return handle in self.cache and self.cache.residency(handle) is Residency.COPYING

    def advance_preloads(self, now_ns: int) -> None:
        cache = self.cache
        for handle in list(self._preloads):
            is_forgotten = handle not in cache
            if is_forgotten or cache.residency(handle) is Residency.DEVICE:
                del self._preloads[handle]
            elif cache.is_pinned(handle) or cache.fits_free_memory(handle):
                self._begin(handle, now_ns, may_evict_wanted=False)
            else:
                # No request needs it: an idle adapter on the device is likelier to be used.
                del self._preloads[handle]


class AdapterScan:
    """One pass over the waiting requests in policy order: begins the loads that each may begin."""

    def __init__(self, filler: CacheFiller, now_ns: int) -> None:
        self._filler = filler
        self._now_ns = now_ns
        self._is_next = True
        self._aged: Request | None = None

    def visit(self, request: Request) -> AdapterReadiness:
        filler, now_ns = self._filler, self._now_ns
        if self._aged is not None and not filler.may_pass(self._aged, request.handles, now_ns):
            return AdapterReadiness.PASSED
        readiness = filler.advance(request.handles, now_ns, is_next=self._is_next)
        if readiness is AdapterReadiness.READY:
            request.adapters_blocked_since_ns = None
        elif readiness is AdapterReadiness.BLOCKED and request.adapters_blocked_since_ns is None:
            request.adapters_blocked_since_ns = now_ns
        if self._aged is None and filler.is_aged(request, now_ns):
            self._aged = request
        return readiness

    def prefetch(self, request: Request) -> None:
        """Begin the loads of a request that is too late in the order for its wait to count."""
        if self._aged is None or self._filler.may_pass(self._aged, request.handles, self._now_ns):
            self._filler.advance(request.handles, self._now_ns, is_next=False)

    def pass_over(self) -> None:
        """Note that the request visited last is not admitted: later ones are not next in line."""
        self._is_next = False

    def preload(self) -> None:
        """Use the memory that is left at the end for preloads."""
        if self._aged is None:
            self._filler.advance_preloads(self._now_ns)
