"""A loader of several ranks: an adapter is in host memory once all ranks have it."""

import dataclasses

import msgspec

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import ErrorInfo
from loraplex.engine.runner import AdapterLoader, HostLoad
from loraplex.parallel.messages import Discard, Load, LoadDone
from loraplex.parallel.ranks import Ranks


@dataclasses.dataclass(frozen=True, slots=True)
class _AgreedLoad:
    """Implements engine.runner.HostLoad."""

    handle: AdapterHandle
    error: ErrorInfo | None
    load_ns: int


class ShardedLoader:
    """Implements engine.runner.AdapterLoader on rank 0. What fails on one rank fails on all."""

    def __init__(self, own: AdapterLoader, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self._ended: dict[AdapterHandle, dict[int, HostLoad | LoadDone]] = {}
        """Loads that have ended on some ranks, by rank."""

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        """Begin to read; returns at once. Raises DeviceLost if a rank is gone."""
        self._ranks.broadcast(Load(handle, source))
        self._own.start(handle, source)

    def poll(self) -> list[_AgreedLoad]:
        """Return the loads that ended on all ranks. Raises DeviceLost if a rank failed."""
        self._ranks.take_events()
        for load in self._own.poll():
            self._ended.setdefault(load.handle, {})[0] = load
        for rank, done in self._ranks.loads:
            self._ended.setdefault(done.handle, {})[rank] = done
        self._ranks.loads.clear()
        num_ranks = self._ranks.world.size
        agreed = [handle for handle, ended in self._ended.items() if len(ended) == num_ranks]
        return [self._agree(handle, self._ended.pop(handle)) for handle in agreed]

    def discard(self, handle: AdapterHandle) -> None:
        """Forget the host copies. Raises DeviceLost if a rank is gone."""
        self._ranks.broadcast(Discard(handle))
        self._own.discard(handle)

    def close(self) -> None:
        self._own.close()

    def _agree(self, handle: AdapterHandle, ended: dict[int, HostLoad | LoadDone]) -> _AgreedLoad:
        load_ns = max(load.load_ns for load in ended.values())
        failed = {rank: load.error for rank, load in ended.items() if load.error is not None}
        if not failed:
            return _AgreedLoad(handle, None, load_ns)
        for rank in ended.keys() - failed.keys():
            if rank:
                self._ranks.send(rank, Discard(handle))
            else:
                self._own.discard(handle)
        rank, error = min(failed.items())
        if rank:
            error = msgspec.structs.replace(error, message=f"rank {rank}: {error.message}")
        return _AgreedLoad(handle, error, load_ns)
