"""Adapter loader whose loads complete at once: real tensors, from no file."""

from collections.abc import Callable

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from support.fake_loader import FakeLoad


class InstantLoader:
    """Implements engine.runner.AdapterLoader."""

    def __init__(self, host: HostAdapters, make: Callable[[AdapterSource], HostAdapter]) -> None:
        self._host = host
        self._make = make
        self.prepare: Callable[[HostAdapter], HostAdapter] = lambda adapter: adapter
        """Equivalent of AdapterBank.prepare."""
        self._loaded: list[FakeLoad] = []

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        self._host[handle] = self.prepare(self._make(source))
        self._loaded.append(FakeLoad(handle))

    def poll(self) -> list[FakeLoad]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def discard(self, handle: AdapterHandle) -> None:
        self._host.pop(handle, None)

    def close(self) -> None:
        """Nothing is held."""
