"""Eviction of adapters from a full tier: orders, and the policies that make them."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from loraplex.core.adapter import AdapterHandle


class EvictionOrder(Protocol):
    """Ordered set of adapters that may be evicted, each with its size."""

    total_size: int
    """Sum of the sizes."""

    def __len__(self) -> int: ...

    def add(self, handle: AdapterHandle, size: int) -> None:
        """Add an adapter that may be evicted, and was used just now."""
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
    """Policy of one tier: its orders, and what it remembers of adapters."""

    def new_order(self) -> EvictionOrder: ...

    def used(self, handle: AdapterHandle) -> None:
        """Note that a request wants an adapter, wherever it is."""
        ...

    def loaded(self, handle: AdapterHandle, load_ns: int) -> None:
        """Note that an adapter was loaded from its file in `load_ns`."""
        ...

    def forget(self, handle: AdapterHandle) -> None:
        """Forget an adapter that is no longer registered."""
        ...


class _Sizes:
    """Sizes of the adapters in an order, by time of joining, with their sum."""

    def __init__(self) -> None:
        self._sizes: dict[AdapterHandle, int] = {}
        self.total_size = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, handle: AdapterHandle, size: int) -> None:
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
    """LRU policy. It remembers nothing: the place in the order is the time of the last use."""

    def new_order(self) -> EvictionOrder:
        return LRU()

    def used(self, handle: AdapterHandle) -> None:
        """Do nothing: joining an order has the same effect."""

    def loaded(self, handle: AdapterHandle, load_ns: int) -> None:
        """Do nothing: all loads count alike."""

    def forget(self, handle: AdapterHandle) -> None:
        """Do nothing: nothing was remembered."""


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
        self._uses: Counter[AdapterHandle] = Counter()
        self._load_ns: dict[AdapterHandle, int] = {}
        self._faded = 0.0
        self._joins = itertools.count()

    def new_order(self) -> EvictionOrder:
        return _LeastWorth(self)

    def used(self, handle: AdapterHandle) -> None:
        self._uses[handle] += 1

    def loaded(self, handle: AdapterHandle, load_ns: int) -> None:
        self._load_ns[handle] = load_ns

    def forget(self, handle: AdapterHandle) -> None:
        self._uses.pop(handle, None)
        self._load_ns.pop(handle, None)

    def worth_now(self, handle: AdapterHandle, size: int) -> _Worth:
        lasting = self._worth(self._uses[handle], self._load_ns.get(handle, 0), size)
        return _Worth(self._faded + lasting, next(self._joins))

    def evicted(self, worth: _Worth) -> None:
        self._faded = max(self._faded, worth.value)


class _LeastWorth(_Sizes):
    """Order of a GreedyDualPolicy. `choose` is O(n), the rest O(1) but for `sizes`."""

    def __init__(self, policy: GreedyDualPolicy) -> None:
        super().__init__()
        self._policy = policy
        self._worths: dict[AdapterHandle, _Worth] = {}

    def add(self, handle: AdapterHandle, size: int) -> None:
        super().add(handle, size)
        self._worths[handle] = self._policy.worth_now(handle, size)

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
