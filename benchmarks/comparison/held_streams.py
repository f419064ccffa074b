"""How many streams a system holds: the most at once whose time between tokens stays below a limit.

One rung after another has more streams, all sent at once with new prompts, until not even nine
tenths of the times between tokens are within the limit. Prompts that are still computed while
others write are part of it, as they are in service.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from comparison.systems import Running, run_load
from loraplex.bench.arrivals import Burst
from loraplex.bench.popularity import BaseOnly
from loraplex.bench.statistics import Percentiles
from loraplex.bench.workload import Lengths, Workload, generate

Share = Literal["p90", "p99"]


class HeldStreams(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the rungs."""

    limit_seconds: float = 0.1
    """Limit of the time between two tokens of a stream."""
    prompt_tokens: int = 64
    output_tokens: int = 32
    rungs: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    """Numbers of streams, ascending."""


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One number of streams, as measured."""

    num_streams: int
    output_tokens_per_second: float
    between_tokens: Percentiles
    """Seconds between successive chunks of one stream."""


class HeldFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The rungs up to the first that is not held."""

    limit_seconds: float
    rungs: tuple[Rung, ...]

    def most(self, share: Share) -> Rung | None:
        """Return the largest rung with this percentile within the limit; None if none has."""
        held = [
            rung for rung in self.rungs if getattr(rung.between_tokens, share) <= self.limit_seconds
        ]
        return max(held, key=lambda rung: rung.num_streams, default=None)


async def measure_held(
    running: Running, load: HeldStreams, vocabulary: Sequence[int], *, seed: int, repeat: int
) -> HeldFigures:
    """Raises RuntimeError if a request fails."""
    rungs: list[Rung] = []
    for num_streams in load.rungs:
        workload = Workload(
            num_requests=num_streams,
            prompt_tokens=Lengths(load.prompt_tokens, load.prompt_tokens),
            output_tokens=Lengths(load.output_tokens, load.output_tokens),
            popularity=BaseOnly(),
            num_adapters=1,
            arrivals=Burst(),
            seed=seed,
        )
        figures = await run_load(running, generate(workload, repeat, vocabulary), None)
        if figures.num_failed or figures.inter_token_latency is None:
            raise RuntimeError(f"{num_streams} streams: {(*figures.errors, 'no two chunks')[0]}")
        rungs.append(
            Rung(
                num_streams=num_streams,
                output_tokens_per_second=figures.output_tokens_per_second,
                between_tokens=figures.inter_token_latency,
            )
        )
        if figures.inter_token_latency.p90 > load.limit_seconds:
            break
    return HeldFigures(limit_seconds=load.limit_seconds, rungs=tuple(rungs))
