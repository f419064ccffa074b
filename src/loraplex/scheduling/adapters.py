"""Which adapters to bring closer for the requests that wait, and who may use the room.

It asks the adapter cache and starts loads and copies; it moves no bytes and knows no files.
"""

import enum
from collections import Counter
from typing import Protocol

from loraplex.core.adapter import AdapterHandle, Residency
from loraplex.core.errors import AdapterLoadError, ErrorInfo
from loraplex.core.plan import AdapterCopy
from loraplex.core.stats import AdapterTierStats
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.scheduling.active import ActiveRequest

LONGEST_EXPIRY_PAUSE_NS = 1_000_000_000


class HostLoads(Protocol):
    """Where host copies come from and go to. Both calls return at once."""

    def start_load(self, handle: AdapterHandle) -> None:
        """Begin to read an adapter; its end is told by AdapterDemand.loaded or load_failed."""
        ...

    def discard(self, handle: AdapterHandle) -> None: ...


class AdapterReadiness(enum.Enum):
    READY = enum.auto()
    """All adapters are on the device."""
    COMING = enum.auto()
    """A load or a copy is under way."""
    LACKS_ROOM = enum.auto()
    """A tier is full of what may not leave now."""
    PASSED = enum.auto()
    """It could go on, but an aged request needs the room."""


class AdapterDemand:
    """Demand for adapters, on top of the AdapterCache.

    No request waits for another one's adapters, with one exception, the bound on being passed
    over. Let X be the first request in policy order whose adapters have lacked room for
    `aging_ns`. Then nothing behind X is admitted that needs an adapter which neither X nor a
    running sequence has; and after twice `aging_ns`, nothing that needs an adapter which X has
    not. So X waits at most 2 * aging_ns and then for the sequences that run at that moment (not
    counting requests of higher priority). The base model needs no room and is never held up.

    Of the requests that wait, only the first may evict adapters that other ones want: so there is
    always one that gets its room, and those behind it cannot take it away again.
    """

    def __init__(
        self, cache: AdapterCache, host: HostLoads, aging_ns: int, ttl_ns: int | None = None
    ) -> None:
        """ttl_ns: what was idle for so long leaves both tiers; None: nothing does."""
        self._cache = cache
        self._host = host
        self._aging_ns = aging_ns
        self._ttl_ns = ttl_ns
        self._next_expiry_ns = 0
        self._pins: Counter[AdapterHandle] = Counter()
        self._loading: set[AdapterHandle] = set()
        self._copying: dict[AdapterHandle, AdapterCopy] = {}
        self._copies_to_start: list[AdapterCopy] = []
        self._preloads: dict[AdapterHandle, None] = {}

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_copying(self) -> int:
        return len(self._copying)

    def refusal(self, handles: tuple[AdapterHandle, ...], now_ns: int) -> AdapterLoadError | None:
        """Why a request that needs these cannot be accepted now: a load failed a moment ago."""
        for handle in handles:
            failure = self._cache.failure(handle)
            if failure is not None and failure.retry_at_ns > now_ns:
                pause_seconds = (failure.retry_at_ns - now_ns) / 1e9
                return load_error(failure.error, pause_seconds)
        return None

    def want(self, handles: tuple[AdapterHandle, ...]) -> None:
        """A request that needs these was accepted."""
        for handle in handles:
            self._cache.want(handle)
        if handles:
            self._cache.count_admission(handles)

    def unwant(self, handles: tuple[AdapterHandle, ...]) -> None:
        for handle in handles:
            self._cache.unwant(handle)

    def pin(self, handles: tuple[AdapterHandle, ...]) -> None:
        """A sequence that needs these takes a slot."""
        for handle in handles:
            self._cache.pin(handle)
            self._pins[handle] += 1

    def unpin(self, handles: tuple[AdapterHandle, ...]) -> None:
        for handle in handles:
            self._cache.unpin(handle)
            self._pins[handle] -= 1
            if not self._pins[handle]:
                del self._pins[handle]

    def preload(self, handle: AdapterHandle) -> None:
        """Bring it to the device when no request wants the room.

        Forgotten if it fails, unless it is held.
        """
        self._preloads[handle] = None

    def hold(self, handle: AdapterHandle) -> None:
        """Keep it on the device, and bring it there. Raises as AdapterCache.hold."""
        self._cache.hold(handle)
        self.preload(handle)

    def release(self, handle: AdapterHandle) -> None:
        """Undo `hold`."""
        self._cache.release(handle)

    def is_held(self, handle: AdapterHandle) -> bool:
        return self._cache.is_held(handle)

    def expire(self, now_ns: int) -> None:
        """Evict what was idle for too long, twice in that time or once a second."""
        if self._ttl_ns is not None and now_ns >= self._next_expiry_ns:
            self._next_expiry_ns = now_ns + min(self._ttl_ns // 2, LONGEST_EXPIRY_PAUSE_NS)
            self._discard(self._cache.expire(now_ns, self._ttl_ns))

    def next_expiry_ns(self) -> int | None:
        """When to call `expire` again; None: as soon as something in a tier is idle, or never."""
        if self._ttl_ns is None or not self._cache.has_idle:
            return None
        return self._next_expiry_ns

    @property
    def running(self) -> Counter[AdapterHandle]:
        """How many sequences that hold a slot need each adapter."""
        return Counter(self._pins)

    def num_running(self, handle: AdapterHandle) -> int:
        """How many sequences that hold a slot need it."""
        return self._pins[handle]

    def is_preloading(self, handle: AdapterHandle) -> bool:
        """Whether a preload was asked for and has not ended."""
        return handle in self._preloads

    def scan(self, now_ns: int) -> "AdapterScan":
        return AdapterScan(self, now_ns)

    def take_copies_to_start(self) -> tuple[AdapterCopy, ...]:
        """For the plan that is launched now."""
        copies = tuple(self._copies_to_start)
        self._copies_to_start.clear()
        return copies

    def start_again(self, copies: tuple[AdapterCopy, ...]) -> None:
        """The plan that named these failed: they are named in the next one, with the same pages."""
        self._copies_to_start.extend(copies)

    def loaded(self, handle: AdapterHandle, load_ns: int) -> None:
        self._loading.remove(handle)
        self._cache.loaded(handle, load_ns)

    def load_failed(self, handle: AdapterHandle, error: ErrorInfo, now_ns: int) -> None:
        self._loading.remove(handle)
        self._forget_preload(handle)
        self._cache.load_failed(handle, error, now_ns)

    def copied(self, handle: AdapterHandle, copy_ns: int) -> None:
        if self._copying.pop(handle, None) is None:
            return  # told again: the copy was named in a plan that failed, and in the next one
        self._preloads.pop(handle, None)
        self._discard(self._cache.copied(handle, copy_ns))

    def copy_failed(self, handle: AdapterHandle, error: ErrorInfo, now_ns: int) -> None:
        if self._copying.pop(handle, None) is None:
            return
        self._forget_preload(handle)
        self._discard(self._cache.copy_failed(handle, error, now_ns))

    def stats(self) -> AdapterTierStats:
        return self._cache.stats()

    def check(self, pins: Counter[AdapterHandle]) -> None:
        """`pins`: how many sequences that hold a slot need each adapter."""
        assert pins == self._pins, f"pins {self._pins}, wanted {pins}"
        self._cache.check()
        for handle in self._loading:
            assert self._cache.residency(handle) is Residency.LOADING
        for handle in self._copying:
            assert self._cache.residency(handle) is Residency.COPYING

    def is_aged(self, request: ActiveRequest, now_ns: int) -> bool:
        """Has it been passed over for longer than the bound?"""
        since_ns = request.lacks_room_since_ns
        return since_ns is not None and now_ns - since_ns >= self._aging_ns

    def may_pass(self, aged: ActiveRequest, handles: tuple[int, ...], now_ns: int) -> bool:
        """May a request that needs `handles` be admitted before the aged one?"""
        others = [handle for handle in handles if handle not in aged.handles]
        assert aged.lacks_room_since_ns is not None
        if now_ns - aged.lacks_room_since_ns >= 2 * self._aging_ns:
            return not others
        return all(handle in self._pins for handle in others)

    def advance(
        self, handles: tuple[AdapterHandle, ...], now_ns: int, *, is_next: bool
    ) -> AdapterReadiness:
        """Begin what can begin for these adapters."""
        on_device = [h for h in handles if self._cache.residency(h) is Residency.DEVICE]
        if len(on_device) == len(handles):
            return AdapterReadiness.READY
        # Their own room must not be made of each other.
        for handle in on_device:
            self._cache.pin(handle)
        has_room = True
        for handle in handles:
            # Once one lacks room, the others may not make theirs of what is wanted: with a host
            # tier that holds only one of two, they would evict each other for ever.
            moved = self._begin(handle, now_ns, may_evict_wanted=is_next and has_room)
            has_room = has_room and moved
        for handle in on_device:
            self._cache.unpin(handle)
        return AdapterReadiness.COMING if has_room else AdapterReadiness.LACKS_ROOM

    def _begin(self, handle: AdapterHandle, now_ns: int, *, may_evict_wanted: bool) -> bool:
        """Begin the next move of an adapter; False if there is no room for it."""
        match self._cache.residency(handle):
            case Residency.ABSENT | Residency.FAILED:
                return self._begin_load(handle, now_ns, may_evict_wanted)
            case Residency.HOST:
                return self._begin_copy(handle, may_evict_wanted)
            case _:
                return True

    def _begin_load(self, handle: AdapterHandle, now_ns: int, may_evict_wanted: bool) -> bool:
        failure = self._cache.failure(handle)
        if failure is not None and failure.retry_at_ns > now_ns:
            return True
        grant = self._cache.begin_load(handle, now_ns, may_evict_wanted=may_evict_wanted)
        if grant is None:
            return False
        self._discard(grant.dropped)
        self._loading.add(handle)
        self._host.start_load(handle)
        return True

    def _begin_copy(self, handle: AdapterHandle, may_evict_wanted: bool) -> bool:
        page_ids = self._cache.begin_copy(handle, may_evict_wanted=may_evict_wanted)
        if page_ids is None:
            return False
        copy = AdapterCopy(handle, page_ids)
        self._copying[handle] = copy
        self._copies_to_start.append(copy)
        return True

    def _forget_preload(self, handle: AdapterHandle) -> None:
        """It failed. What is held shall be there, so that is tried again after the pause."""
        if not self._cache.is_held(handle):
            self._preloads.pop(handle, None)

    def _discard(self, handles: tuple[AdapterHandle, ...]) -> None:
        for handle in handles:
            self._host.discard(handle)

    def advance_preloads(self, now_ns: int) -> None:
        for handle in list(self._preloads):
            is_forgotten = handle not in self._cache
            if is_forgotten or self._cache.residency(handle) is Residency.DEVICE:
                del self._preloads[handle]
            else:
                self._begin(handle, now_ns, may_evict_wanted=False)


class AdapterScan:
    """One pass over waiting requests, in policy order: each begins what it may begin."""

    def __init__(self, demand: AdapterDemand, now_ns: int) -> None:
        self._demand = demand
        self._now_ns = now_ns
        self._is_next = True
        self._aged: ActiveRequest | None = None

    def visit(self, request: ActiveRequest) -> AdapterReadiness:
        demand, now_ns = self._demand, self._now_ns
        if self._aged is not None and not demand.may_pass(self._aged, request.handles, now_ns):
            return AdapterReadiness.PASSED
        readiness = demand.advance(request.handles, now_ns, is_next=self._is_next)
        if readiness is AdapterReadiness.READY:
            request.lacks_room_since_ns = None
        elif readiness is AdapterReadiness.LACKS_ROOM and request.lacks_room_since_ns is None:
            request.lacks_room_since_ns = now_ns
        if self._aged is None and demand.is_aged(request, now_ns):
            self._aged = request
        return readiness

    def pass_over(self) -> None:
        """The request visited last is not admitted: those behind it are not the next in line."""
        self._is_next = False

    def preload(self) -> None:
        """At the end: use room that is left for what is not wanted yet."""
        if self._aged is None:
            self._demand.advance_preloads(self._now_ns)


def load_error(reason: ErrorInfo, pause_seconds: float) -> AdapterLoadError:
    return AdapterLoadError(
        f"the adapter could not be loaded: {reason.message}", retry_after_seconds=pause_seconds
    )
