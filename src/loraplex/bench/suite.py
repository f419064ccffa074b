"""What is run in which order: every load with the base model alone and with each popularity.

The runs that are compared stand side by side: for each load of each repeat, base and popularities
one after another, and in another order in the next repeat, so that a machine that slows down or
warms up does so for all of them. The first pass is not counted.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from loraplex.bench.arrivals import ClosedLoop
from loraplex.bench.client import Target, run
from loraplex.bench.popularity import BaseOnly, Distinct
from loraplex.bench.report import WorkloadResult
from loraplex.bench.settings import Settings
from loraplex.bench.statistics import (
    RunStatistics,
    median_of_runs,
    summarize,
    throughput_ratio,
)
from loraplex.bench.workload import Lengths, Workload, generate
from loraplex.core.errors import ConfigError

_WARM_UP_CONCURRENCY = 8


class Progress(Protocol):
    """Display of the progress."""

    def begin(self, num_runs: int) -> None: ...

    def done(self, workload: Workload) -> None:
        """One more run is over."""
        ...


async def run_suite(
    target: Target, settings: Settings, progress: Progress
) -> tuple[WorkloadResult, ...]:
    """Raises ConfigError if the server cannot take these settings."""
    _check(target, settings)
    progress.begin(settings.num_runs)
    await _warm_up(target, settings)
    groups = settings.groups()
    runs: dict[Workload, list[RunStatistics]] = {w: [] for group in groups for w in group}
    for repeat in range(settings.repeats + 1):
        for workload in _in_turn(groups, repeat):
            figures = await _measure(target, workload, repeat)
            progress.done(workload)
            if repeat > 0:
                runs[workload].append(figures)
    return tuple(
        _result(workload, runs[workload], runs[group[0]]) for group in groups for workload in group
    )


def _in_turn(groups: Sequence[Sequence[Workload]], repeat: int) -> Iterator[Workload]:
    for group in groups:
        first = repeat % len(group)
        yield from group[first:]
        yield from group[:first]


async def _measure(target: Target, workload: Workload, repeat: int) -> RunStatistics:
    requests = generate(workload, repeat, target.vocabulary)
    start_ns, records = await run(target, requests, workload.arrivals)
    return summarize(records, start_ns)


def _result(
    workload: Workload, runs: Sequence[RunStatistics], base_runs: Sequence[RunStatistics]
) -> WorkloadResult:
    is_base = isinstance(workload.popularity, BaseOnly)
    return WorkloadResult(
        workload=workload,
        runs=tuple(runs),
        median=median_of_runs(runs),
        throughput_ratio_to_base=None if is_base else throughput_ratio(runs, base_runs),
    )


def _check(target: Target, settings: Settings) -> None:
    if settings.num_adapters > len(target.adapters):
        raise ConfigError(
            f"{target.url} serves {len(target.adapters)} adapters of {target.base!r}; "
            f"{settings.num_adapters} are requested"
        )
    longest = settings.prompt_tokens.high + settings.output_tokens.high
    if target.max_model_len is not None and longest > target.max_model_len:
        raise ConfigError(
            f"prompt and output together may have {longest} tokens; {target.base!r} takes "
            f"{target.max_model_len}"
        )


async def _warm_up(target: Target, settings: Settings) -> None:
    """One request to every adapter, so that no counted run waits for a load.

    Raises ConfigError if one fails: every run would.
    """
    if not settings.num_adapters:
        return
    arrivals = ClosedLoop(_WARM_UP_CONCURRENCY)
    workload = Workload(
        num_requests=settings.num_adapters,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=Lengths(1, 1),
        popularity=Distinct(),
        num_adapters=settings.num_adapters,
        arrivals=arrivals,
        seed=settings.seed,
    )
    figures = await _measure(target, workload, repeat=0)
    if figures.num_failed:
        raise ConfigError(f"a request to warm up failed: {figures.errors[0]}")
