"""Handles of the engine's adapters: by digest, and from a handle to its file."""

from collections.abc import Callable, Iterable, Mapping

from loraplex.core.adapter import AdapterHandle, AdapterSource, AdapterUse, Residency, not_in_cache
from loraplex.core.errors import AdapterNotFoundError
from loraplex.core.plan import Capacity
from loraplex.core.stats import AdapterActivity
from loraplex.engine.runner import AdapterLoader
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.adapter_pages import most_pages


class AdapterHandles:
    """Handle of each digest, and its source. Starts the loads that the scheduler requests.

    Implements scheduling's HostLoads. The adapter cache knows where an adapter is.
    """

    def __init__(
        self,
        cache: AdapterCache,
        loader: AdapterLoader,
        capacity: Capacity,
    ) -> None:
        self._capacity = capacity
        self._cache = cache
        self._loader = loader
        self._handles: dict[str, AdapterHandle] = {}
        self._sources: dict[AdapterHandle, AdapterSource] = {}
        self._leaving: set[str] = set()
        """Digests to forget as soon as no request needs them."""
        self._next_handle = 1

    def register(self, source: AdapterSource) -> AdapterHandle:
        """Return the handle of a digest, a new one for a new digest.

        A known digest keeps its handle, and from now on is read from the newly named file. Raises
        AdapterTooLargeError if the adapter does not fit even alone.
        """
        self._leaving.discard(source.digest)
        handle = self._handles.get(source.digest)
        if handle is None:
            handle = self._next_handle
            capacity = self._capacity
            pages = most_pages(capacity.held(source.targets), capacity.page_geometry)
            num_bytes = pages * capacity.host_page_bytes or source.num_bytes
            self._cache.register(handle, num_bytes, pages)
            self._next_handle += 1
            self._handles[source.digest] = handle
        self._sources[handle] = source
        return handle

    def unregister(self, digest: str) -> bool:
        """Forget a digest and its copies. False and no change while it is in use or loading.

        Raises AdapterNotFoundError.
        """
        handle = self.handle(digest)
        dropped = self._cache.forget(handle)
        if dropped is None:
            return False
        for dropped_handle in dropped:
            self._loader.discard(dropped_handle)
        del self._handles[digest], self._sources[handle]
        self._leaving.discard(digest)
        return True

    def forget(self, digest: str) -> None:
        """Unregister a digest now, or as soon as no request needs it, if it is known."""
        if digest in self._handles and not self.unregister(digest):
            self._cache.unpin(self._handles[digest])
            self._leaving.add(digest)

    def forget_unneeded(self) -> None:
        """Unregister the digests to forget that no request needs any longer."""
        for digest in list(self._leaving):
            self.unregister(digest)

    def activity(
        self, running: Mapping[AdapterHandle, int], waiting: Mapping[AdapterHandle, int]
    ) -> AdapterActivity:
        """Report the adapters; running, waiting: numbers of sequences by adapter."""
        digests = {handle: digest for digest, handle in self._handles.items()}
        residency = {handle: self._cache.residency(handle) for handle in digests}
        return AdapterActivity(
            residency={
                digests[handle]: where
                for handle, where in residency.items()
                if where is not Residency.ABSENT
            },
            running={digests[handle]: number for handle, number in running.items()},
            waiting={digests[handle]: number for handle, number in waiting.items()},
            pinned=tuple(d for handle, d in digests.items() if self._cache.is_pinned(handle)),
        )

    def __contains__(self, digest: str) -> bool:
        return digest in self._handles

    def require_resident(
        self, uses: Iterable[AdapterUse], is_preloading: Callable[[AdapterHandle], bool]
    ) -> None:
        """Raise AdapterNotFoundError if one is in no tier and not preloading."""
        for use in uses:
            handle = self.handle(use.digest)
            is_away = self._cache.residency(handle) in (Residency.ABSENT, Residency.FAILED)
            if is_away and not is_preloading(handle):
                raise not_in_cache(f"the adapter {use.digest[:12]}")

    def handle(self, digest: str) -> AdapterHandle:
        """Return the handle of a digest. Raises AdapterNotFoundError."""
        handle = self._handles.get(digest)
        if handle is None:
            raise AdapterNotFoundError(f"this engine has no adapter with digest {digest}")
        return handle

    def digest(self, handle: AdapterHandle) -> str:
        return self._sources[handle].digest

    def resolve(self, uses: Iterable[AdapterUse]) -> tuple[tuple[AdapterHandle, float], ...]:
        """Return (handle, scale) of each adapter of a request.

        Raises AdapterNotFoundError, or AdapterTooLargeError if they do not fit together.
        """
        resolved = tuple((self.handle(use.digest), use.scale) for use in uses)
        if resolved:
            self._cache.require_fit(handle for handle, _ in resolved)
        return resolved

    def start_load(self, handle: AdapterHandle) -> None:
        self._loader.start(handle, self._sources[handle])

    def discard(self, handle: AdapterHandle) -> None:
        self._loader.discard(handle)
