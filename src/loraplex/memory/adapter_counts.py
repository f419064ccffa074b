"""What happened in an adapter cache since it was made: for the statistics only."""

import dataclasses
from collections.abc import Collection
from typing import Any

from loraplex.core.adapter import Residency
from loraplex.core.stats import Durations

_ON_HOST = {Residency.DEVICE, Residency.COPYING, Residency.HOST}
_NONE_YET = Durations()


@dataclasses.dataclass(slots=True)
class AdapterCounts:
    """The names are those of AdapterTierStats."""

    device_hits: int = 0
    device_misses: int = 0
    host_hits: int = 0
    host_misses: int = 0
    loads: int = 0
    load_failures: int = 0
    copies: int = 0
    host_evictions: int = 0
    device_evictions: int = 0
    read_times: Durations = _NONE_YET
    copy_times: Durations = _NONE_YET

    def admission(self, found: Collection[Residency]) -> None:
        """A request came; `found` is where its adapters were."""
        if all(where is Residency.DEVICE for where in found):
            self.device_hits += 1
            return
        self.device_misses += 1
        if all(where in _ON_HOST for where in found):
            self.host_hits += 1
        else:
            self.host_misses += 1

    def load(self, load_ns: int) -> None:
        self.loads += 1
        self.read_times = self.read_times.with_one(load_ns)

    def copy(self, copy_ns: int) -> None:
        self.copies += 1
        self.copy_times = self.copy_times.with_one(copy_ns)

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
