"""What a server's two tiers of adapters did for requests: its own counts, and how recently the
adapter of each request was used before.

Knows no wire: takes the text of /metrics, and the times that clients saw.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loraplex.core.errors import ConfigError

_SAMPLES: dict[str, tuple[str, dict[str, str]]] = {
    "device_hits": ("loraplex_adapter_cache_lookups_total", {"result": "hit"}),
    "device_misses": ("loraplex_adapter_cache_lookups_total", {"result": "miss"}),
    "host_hits": ("loraplex_adapter_host_lookups_total", {"result": "hit"}),
    "host_misses": ("loraplex_adapter_host_lookups_total", {"result": "miss"}),
    "loads": ("loraplex_adapter_loads_total", {}),
    "load_failures": ("loraplex_adapter_load_failures_total", {}),
    "copies": ("loraplex_adapter_copies_total", {}),
    "device_evictions": ("loraplex_adapter_evictions_total", {"tier": "device"}),
    "host_evictions": ("loraplex_adapter_evictions_total", {"tier": "host"}),
    "read_seconds": ("loraplex_adapter_load_seconds_sum", {"stage": "read"}),
    "copy_seconds": ("loraplex_adapter_load_seconds_sum", {"stage": "copy"}),
}
"""(metric, labels) by field of TierCounters."""


class TierCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Since a server of one model started, or between two moments."""

    device_hits: float
    """Requests that found their adapter on the device."""
    device_misses: float
    host_hits: float
    """Those misses in which the adapter was on the host."""
    host_misses: float
    loads: float
    """Adapters read into the host tier."""
    load_failures: float
    copies: float
    """Copies from the host to the device."""
    device_evictions: float
    host_evictions: float
    read_seconds: float
    """Duration of all loads together."""
    copy_seconds: float

    @property
    def device_hit_rate(self) -> float | None:
        """None: there was no request for an adapter."""
        return _share(self.device_hits, self.device_misses)

    @property
    def host_hit_rate(self) -> float | None:
        """Fraction of the absent adapters; None: all were on the device."""
        return _share(self.host_hits, self.host_misses)

    def since(self, before: "TierCounters") -> "TierCounters":
        return TierCounters(
            **{name: getattr(self, name) - getattr(before, name) for name in _SAMPLES}
        )


def sum_counters(parts: Sequence[TierCounters]) -> TierCounters:
    return TierCounters(**{name: sum(getattr(part, name) for part in parts) for name in _SAMPLES})


def read_counters(metrics: str) -> TierCounters:
    """Read the response of GET /metrics. Raises ConfigError if a counter is missing."""
    samples = [
        sample for family in text_string_to_metric_families(metrics) for sample in family.samples
    ]
    return TierCounters(**{name: _find(samples, *wanted) for name, wanted in _SAMPLES.items()})


class AdapterUse(NamedTuple):
    """One request, as its client saw it. Times are of one clock, in nanoseconds."""

    adapter: int
    start_ns: int
    end_ns: int


def reuse_distances(uses: Sequence[AdapterUse]) -> list[int | None]:
    """Return for each use the number of other adapters in use at its start or since its last use.

    It is 0 if its own adapter is in use, None if it never was.

    That is the distance in an LRU stack (Mattson et al., IBM Systems Journal 9(2), 1970) where what
    is in use lies on top: a cache of n adapters that evicts the one that was idle
    longest holds exactly those of a distance below n, if never more than n are in use at once.
    """
    moments = sorted(
        moment
        for index, use in enumerate(uses)
        # At the same time, the start comes first: what follows at once is use without a gap.
        for moment in ((use.start_ns, False, index), (use.end_ns, True, index))
    )
    distances: list[int | None] = [None] * len(uses)
    in_use: Counter[int] = Counter()
    idle: dict[int, None] = {}
    for _, is_end, index in moments:
        adapter = uses[index].adapter
        if not is_end:
            distances[index] = _distance(adapter, in_use, idle)
            idle.pop(adapter, None)
            in_use[adapter] += 1
        elif in_use[adapter] > 1:
            in_use[adapter] -= 1
        else:
            del in_use[adapter]
            idle[adapter] = None
    return distances


def _distance(adapter: int, in_use: Mapping[int, int], idle: Mapping[int, None]) -> int | None:
    """idle: in the order in which they became so."""
    if adapter in in_use:
        return 0
    if adapter not in idle:
        return None
    newer = itertools.takewhile(lambda other: other != adapter, reversed(idle))
    return len(in_use) + sum(1 for _ in newer)


def _share(hits: float, misses: float) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _find(samples: Sequence[Sample], metric: str, labels: Mapping[str, str]) -> float:
    for sample in samples:
        if sample.name == metric and labels.items() <= sample.labels.items():
            return sample.value
    raise ConfigError(f"the server's metrics have no {metric} with the labels {dict(labels)}")
