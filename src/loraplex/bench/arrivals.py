"""When requests are sent."""

import itertools
import random

import msgspec


class Law(msgspec.Struct, frozen=True):
    """Value that is written `name:number,number` on a command line and in reports."""

    def __str__(self) -> str:
        numbers = (
            f"{n:g}" if isinstance(n, float) else str(n) for n in msgspec.structs.astuple(self)
        )
        return ":".join(filter(None, (str(self.__struct_config__.tag), ",".join(numbers))))


class Burst(Law, frozen=True, tag="burst"):
    """All requests at once."""


class ClosedLoop(Law, frozen=True, tag="closed"):
    """`concurrency` clients, each sending its next request when the last response is complete."""

    concurrency: int


class Poisson(Law, frozen=True, tag="poisson"):
    """Independent arrivals at a mean rate, whether or not earlier responses are complete."""

    requests_per_second: float


class Gamma(Law, frozen=True, tag="gamma"):
    """Like Poisson, but the gaps between arrivals are Gamma distributed with a coefficient of
    variation `cv`: 1 is Poisson, above it requests come in clumps. S-LoRA's arrivals.
    """

    requests_per_second: float
    cv: float


Arrivals = Burst | ClosedLoop | Poisson | Gamma


def draw(arrivals: Arrivals, count: int, seed: str) -> list[float]:
    """Seconds from the start of the run; all 0 where requests do not come by the clock."""
    draws = random.Random(seed)
    match arrivals:
        case Burst() | ClosedLoop():
            return [0.0] * count
        case Poisson(rate):
            gaps = [draws.expovariate(rate) for _ in range(count)]
        case Gamma(rate, cv):
            gaps = [draws.gammavariate(cv**-2, cv**2 / rate) for _ in range(count)]
    return [*itertools.accumulate(gaps)]
