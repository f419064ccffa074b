"""A loader of several ranks: an adapter is in host memory once all ranks have it."""

import dataclasses
from typing import Final

import msgspec

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.clock import Clock, SystemClock
from loraplex.core.errors import DeviceLost, ErrorInfo
from loraplex.engine.runner import AdapterLoader, HostLoad
from loraplex.parallel.messages import Discard, Load, LoadDone
from loraplex.parallel.ranks import Ranks

LOAD_SECONDS: Final = 300.0
"""Limit of a load on one rank after another rank has ended it, while no other load ends there. A
rank whose disk hangs takes commands, so its replies to probes do not show it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _AgreedLoad:
    """Implements engine.runner.HostLoad."""

    handle: AdapterHandle
    error: ErrorInfo | None
    load_ns: int


class ShardedLoader:
    """Implements engine.runner.AdapterLoader on rank 0. What fails on one rank fails on all."""

    def __init__(self, own: AdapterLoader, ranks: Ranks, clock: Clock | None = None) -> None:
        self._own = own
        self._ranks = ranks
        self._clock = clock or SystemClock()
        self._first_ns: dict[AdapterHandle, int] = {}
        """When the first rank ended a load that others have not ended."""
        self._last_ns: dict[int, int] = {}
        """When each rank ended its last load."""
        self._ended: dict[AdapterHandle, dict[int, HostLoad | LoadDone]] = {}
        """Loads that have ended on some ranks, by rank."""

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        """Begin to read; returns at once. Raises DeviceLost if a rank is gone."""
        self._ranks.broadcast(Load(handle, source))
        self._own.start(handle, source)

    def poll(self) -> list[_AgreedLoad]:
        """Return the loads that ended on all ranks.

        Raises DeviceLost if a rank failed, or if its loads make no progress that others have made.
        """
        self._ranks.take_events()
        now_ns = self._clock.now_ns()
        loads: list[tuple[int, HostLoad | LoadDone]] = [(0, load) for load in self._own.poll()]
        loads += self._ranks.loads
        for rank, load in loads:
            self._ended.setdefault(load.handle, {})[rank] = load
            self._first_ns.setdefault(load.handle, now_ns)
            self._last_ns[rank] = now_ns
        self._ranks.loads.clear()
        num_ranks = self._ranks.world.size
        agreed = [handle for handle, ended in self._ended.items() if len(ended) == num_ranks]
        for handle in agreed:
            del self._first_ns[handle]
        self._check_progress(now_ns)
        return [self._agree(handle, self._ended.pop(handle)) for handle in agreed]

    def _check_progress(self, now_ns: int) -> None:
        for handle, first_ns in self._first_ns.items():
            for rank in set(range(self._ranks.world.size)) - self._ended[handle].keys():
                if now_ns - max(first_ns, self._last_ns.get(rank, 0)) > LOAD_SECONDS * 1e9:
                    reason = (
                        f"rank {rank} did not load an adapter within {LOAD_SECONDS:g} s after "
                        "another rank had"
                    )
                    self._ranks.give_up(reason)
                    raise DeviceLost(reason)

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
