"""In which order things leave a tier that is full."""

from collections.abc import Callable
from typing import Protocol

from loraplex.core.adapter import AdapterHandle


class EvictionOrder(Protocol):
    """A set of adapters that may be evicted, each with its size, in an order of its own."""

    @property
    def total_size(self) -> int: ...

    def __len__(self) -> int: ...

    def add(self, handle: AdapterHandle, size: int) -> None:
        """It may be evicted, and was used just now."""
        ...

    def remove(self, handle: AdapterHandle) -> None:
        """It is gone, or must not be evicted now."""
        ...

    def choose(self, size: int) -> list[AdapterHandle]:
        """Those to evict first, until their sizes add up to `size`; all, if they do not."""
        ...

    def sizes(self) -> dict[AdapterHandle, int]:
        """Everything in it, first to leave first."""
        ...


class LRU:
    """Least recently used first. All operations but `choose` and `sizes` are O(1)."""

    def __init__(self) -> None:
        self._sizes: dict[AdapterHandle, int] = {}
        self._total_size = 0

    @property
    def total_size(self) -> int:
        return self._total_size

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, handle: AdapterHandle, size: int) -> None:
        assert handle not in self._sizes, f"adapter {handle} is in the order already"
        self._sizes[handle] = size
        self._total_size += size

    def remove(self, handle: AdapterHandle) -> None:
        self._total_size -= self._sizes.pop(handle)

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


NewEvictionOrder = Callable[[], EvictionOrder]
