"""What serving has told an engine about adapters, and what is to be told to the next one."""

from collections.abc import Callable

from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import ErrorInfo, error_from_info
from loraplex.engine.messages import EngineCommand, RegisterAdapter, UnregisterAdapter

Send = Callable[[EngineCommand], None]


class EngineRegistrations:
    """By digest. What the running engine knows is forgotten when it dies."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        """The running engine was told of them, and has not been told to forget them."""
        self.pinned: dict[str, AdapterSource] = {}
        """What is to stay on the device, also of the next engine."""
        self._rejected: dict[str, ErrorInfo] = {}
        """What the running engine can never serve."""
        self._leaving: set[str] = set()
        """Unloaded while requests needed them: an engine knows them for these requests only."""

    def require_servable(self, source: AdapterSource) -> None:
        """Raise what the running engine said of an adapter that it rejected."""
        rejection = self._rejected.get(source.digest)
        if rejection is not None:
            raise error_from_info(rejection)

    def want(self, source: AdapterSource, send: Send) -> None:
        """Somebody asks for it: the engine is told of it. Raises as require_servable."""
        self.expect(source)
        self.register(source, send)

    def expect(self, source: AdapterSource) -> None:
        """Somebody asks for it, and an engine will be told. Raises as require_servable."""
        self.require_servable(source)
        self._leaving.discard(source.digest)

    def register(self, source: AdapterSource, send: Send) -> None:
        """A request in work needs it."""
        if source.digest not in self.registered:
            self.registered.add(source.digest)
            send(RegisterAdapter(source))

    def let_leave(self, source: AdapterSource, send: Send) -> None:
        """The engine has the request: what was unloaded since then is let go behind it."""
        if source.digest in self._leaving and source.digest in self.registered:
            self.registered.remove(source.digest)
            send(UnregisterAdapter(source.digest))

    def forget(self, digest: str, send: Send | None, *, is_needed: bool) -> None:
        """It was unloaded; is_needed: by requests in work, which the next engine may get."""
        self._rejected.pop(digest, None)
        self.pinned.pop(digest, None)
        if is_needed:
            self._leaving.add(digest)
        if digest in self.registered:
            self.registered.remove(digest)
            if send is not None:
                send(UnregisterAdapter(digest))

    def reject(self, digest: str, error: ErrorInfo) -> bool:
        """The engine can never serve it. False if it gave a reason before: the first one counts.

        A preload sent behind the registration is refused, too.
        """
        self.registered.discard(digest)  # it is told again once the reason may be gone
        is_first = digest not in self._rejected
        if is_first:
            self._rejected[digest] = error
        return is_first

    def forgive(self) -> None:
        """There is more room: what was rejected may be asked for again."""
        self._rejected.clear()

    def lose_engine(self) -> None:
        """The next engine knows nothing."""
        self.registered.clear()
        self._rejected.clear()
