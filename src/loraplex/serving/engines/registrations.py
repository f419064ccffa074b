"""Registrations of adapters with an engine, and those to repeat for the next engine."""

from collections.abc import Callable, Collection

from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import ErrorInfo, error_from_info
from loraplex.engine.messages import EngineCommand, RegisterAdapter, UnregisterAdapter

Send = Callable[[EngineCommand], None]


class EngineRegistrations:
    """Registrations by digest. Those of a dead engine are forgotten."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        """Digests that are registered with the running engine."""
        self.pinned: dict[str, AdapterSource] = {}
        """Adapters that are to stay on the device, also with the next engine."""
        self.confirmed: set[str] = set()
        """Those that the running engine has confirmed to `AsyncEngine.pin`."""
        self._rejected: dict[str, ErrorInfo] = {}
        """Adapters that the running engine can never serve, with the reason."""
        self._leaving: set[str] = set()
        """Digests unloaded while requests need them: registered for these requests only."""

    def want(self, source: AdapterSource, send: Send) -> None:
        """Register an adapter that the operator wants. Raises as `expect`."""
        self.expect(source)
        self.register(source, send)

    def expect(self, source: AdapterSource) -> None:
        """Note that an adapter is wanted and will be registered.

        Raises the running engine's error if it rejected the adapter.
        """
        rejection = self._rejected.get(source.digest)
        if rejection is not None:
            raise error_from_info(rejection)
        self._leaving.discard(source.digest)

    def register(self, source: AdapterSource, send: Send) -> None:
        """Register an adapter for an in-flight request, unless it is registered."""
        if source.digest not in self.registered:
            self.registered.add(source.digest)
            send(RegisterAdapter(source))

    def let_leave(self, source: AdapterSource, send: Send) -> None:
        """Unregister an adapter that was unloaded meanwhile: the engine has the request now."""
        if source.digest in self._leaving and source.digest in self.registered:
            self.registered.remove(source.digest)
            send(UnregisterAdapter(source.digest))

    def forget(self, digest: str, send: Send | None, needed: Collection[str]) -> None:
        """Forget an unloaded adapter. needed: digests that in-flight requests use."""
        self._rejected.pop(digest, None)
        self.pinned.pop(digest, None)
        self.confirmed.discard(digest)
        self._leaving.intersection_update(needed)  # the requests of others have ended
        if digest in needed:
            self._leaving.add(digest)
        if digest in self.registered:
            self.registered.remove(digest)
            if send is not None:
                send(UnregisterAdapter(digest))

    def reject(self, digest: str, error: ErrorInfo) -> bool:
        """Note why the engine can never serve an adapter; False if a reason is known already.

        A preload sent after the registration is refused, too.
        """
        self.registered.discard(digest)  # registered again once the reason may be gone
        is_first = digest not in self._rejected
        if is_first:
            self._rejected[digest] = error
        return is_first

    def forgive(self) -> None:
        """Forget rejections, since there is more memory now."""
        self._rejected.clear()

    def lose_engine(self) -> None:
        """Forget what a dead engine knew."""
        self.registered.clear()
        self.confirmed.clear()
        self._rejected.clear()
