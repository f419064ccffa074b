"""An adapter loader without files: loads end after a number of polls, and fail on demand."""

import dataclasses
from collections import Counter

from loraplex.core.adapter import AdapterHandle, AdapterSource, LoraTarget
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import PageGeometry


@dataclasses.dataclass(frozen=True, slots=True)
class FakeLoad:
    """Implements engine.runner.HostLoad."""

    handle: AdapterHandle
    error: ErrorInfo | None = None
    load_ns: int = 0


class FakeLoader:
    """Implements engine.runner.AdapterLoader. What it has loaded is in `host`.

    Raises AssertionError if a request loads what is loading or loaded, or discards what is
    not there.
    """

    def __init__(self, num_polls: int = 1) -> None:
        """A load ends with the num_polls-th call of poll after its start."""
        self.num_polls = num_polls
        self.host: dict[AdapterHandle, AdapterSource] = {}
        self.num_loads = 0
        self.is_closed = False
        self._loading: dict[AdapterHandle, tuple[AdapterSource, int]] = {}
        self._failures: Counter[str] = Counter()

    def fail(self, digest: str, times: int = 1) -> None:
        """Let the next loads of this adapter fail."""
        self._failures[digest] += times

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        assert handle not in self._loading, f"adapter {handle} is being loaded already"
        assert handle not in self.host, f"adapter {handle} is on the host already"
        self._loading[handle] = (source, self.num_polls)
        self.num_loads += 1

    def poll(self) -> list[FakeLoad]:
        ended = []
        for handle, (source, num_left) in list(self._loading.items()):
            if num_left > 1:
                self._loading[handle] = (source, num_left - 1)
                continue
            del self._loading[handle]
            ended.append(FakeLoad(handle, self._end(handle, source)))
        return ended

    def discard(self, handle: AdapterHandle) -> None:
        assert handle in self.host, f"adapter {handle} is not on the host"
        del self.host[handle]

    def close(self) -> None:
        self.is_closed = True

    def _end(self, handle: AdapterHandle, source: AdapterSource) -> ErrorInfo | None:
        if self._failures[source.digest]:
            self._failures[source.digest] -= 1
            return ErrorInfo("invalid_adapter", f"{source.path} is broken")
        self.host[handle] = source
        return None


def fake_source(
    digest: str, geometry: PageGeometry, *, num_pages: int = 1, num_bytes: int = 100
) -> AdapterSource:
    """A staged adapter that takes up so many device pages and host bytes."""
    num_elements = geometry.page_elements
    targets = tuple(
        LoraTarget(layer, "q", 1, num_elements // 2, num_elements - num_elements // 2)
        for layer in range(num_pages)
    )
    return AdapterSource(digest, f"/staged/{digest}", num_bytes, targets)
