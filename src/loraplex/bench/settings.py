"""Settings of a benchmark, and the workloads that follow from them."""

import msgspec

from loraplex.bench.arrivals import Arrivals, ClosedLoop
from loraplex.bench.popularity import BaseOnly, Popularity
from loraplex.bench.workload import Lengths, Workload

_MIN_REQUESTS = 8


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    loads: tuple[Arrivals, ...]
    popularities: tuple[Popularity, ...]
    """Each is compared with the base model alone; none of them if there are no adapters."""
    num_adapters: int
    num_requests: int | None
    """Requests of each run; None: two for each client of a closed loop, at least 8."""
    prompt_tokens: Lengths
    output_tokens: Lengths
    repeats: int
    seed: int

    @property
    def num_runs(self) -> int:
        """All workloads, with those of the first pass."""
        return (self.repeats + 1) * sum(len(group) for group in self.groups())

    def groups(self) -> list[list[Workload]]:
        """The workloads of each load: the base model's, then one for each popularity."""
        adapted = self.popularities if self.num_adapters else ()
        popularities = dict.fromkeys([BaseOnly(), *adapted])
        return [
            [self._workload(load, popularity) for popularity in popularities]
            for load in dict.fromkeys(self.loads)
        ]

    def _workload(self, load: Arrivals, popularity: Popularity) -> Workload:
        concurrency = load.concurrency if isinstance(load, ClosedLoop) else 0
        return Workload(
            num_requests=self.num_requests or max(_MIN_REQUESTS, 2 * concurrency),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            popularity=popularity,
            num_adapters=self.num_adapters,
            arrivals=load,
            seed=self.seed,
        )
