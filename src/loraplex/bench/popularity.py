"""Adapter popularity: the distributions that benchmarks of LoRA serving draw from."""

import math
import random

from loraplex.bench.arrivals import Law


class BaseOnly(Law, frozen=True, tag="base"):
    """No adapter at all: what the others are compared with."""


class Identical(Law, frozen=True, tag="identical"):
    """Every request uses the first adapter."""


class Uniform(Law, frozen=True, tag="uniform"):
    """Every request draws one of the adapters, all equally likely."""


class Distinct(Law, frozen=True, tag="distinct"):
    """The adapters in turn: any `num_adapters` successive requests use different adapters."""


class Shuffled(Law, frozen=True, tag="shuffled"):
    """Every adapter equally often (once more for some if that does not divide), in any order."""


class Zipf(Law, frozen=True, tag="zipf"):
    """Adapter k (from 1) is drawn with a probability proportional to k ** -exponent.

    Zipf's law itself; some benchmarks call a geometric rule (`Geometric`) by this name.
    """

    exponent: float


class PowerFunction(Law, frozen=True, tag="powerfunc"):
    """S-LoRA's: P(one of the first k of n adapters) = (k / n) ** exponent.

    Uniform at exponent 1, and the more skewed the smaller it is.
    """

    exponent: float


class Geometric(Law, frozen=True, tag="geometric"):
    """Punica's "skewed": 1, ratio, ratio ** 2, ... requests for one adapter each, rounded down,
    and the rest for one more (`geometric_sizes`), in any order. It takes as many adapters as it
    takes; the i-th of them is i modulo `num_adapters`.
    """

    ratio: float


class SquareRoot(Law, frozen=True, tag="square-root"):
    """Punica's "uniform": the square root of the number of requests (rounded up) many adapters,
    each equally often, in any order.
    """


Popularity = (
    BaseOnly
    | Identical
    | Uniform
    | Distinct
    | Shuffled
    | Zipf
    | PowerFunction
    | Geometric
    | SquareRoot
)


def draw(popularity: Popularity, count: int, num_adapters: int, seed: str) -> list[int | None]:
    """An adapter's index for each of `count` requests; None for the base model."""
    draws = random.Random(seed)
    indices = range(num_adapters)
    match popularity:
        case BaseOnly():
            return [None] * count
        case Identical():
            return [0] * count
        case Distinct():
            return [index % num_adapters for index in range(count)]
        case Shuffled():
            return _shuffled([index % num_adapters for index in range(count)], draws)
        case Uniform():
            return [*draws.choices(indices, k=count)]
        case Zipf(exponent):
            weights = [rank**-exponent for rank in range(1, num_adapters + 1)]
            return [*draws.choices(indices, weights, k=count)]
        case PowerFunction(exponent):
            return [int(draws.random() ** (1 / exponent) * num_adapters) for _ in range(count)]
        case Geometric(ratio):
            sizes = enumerate(geometric_sizes(count, ratio))
            return _shuffled([i % num_adapters for i, size in sizes for _ in range(size)], draws)
        case SquareRoot():
            num_used = math.ceil(count**0.5)
            return _shuffled([index % num_used % num_adapters for index in range(count)], draws)


def geometric_sizes(count: int, ratio: float) -> list[int]:
    """How many of `count` requests each adapter gets, most first. `ratio` is above 1."""
    sizes: list[int] = []
    rest = count
    size = 1.0
    while rest >= int(size):
        sizes.append(int(size))
        rest -= int(size)
        size *= ratio
    if rest:
        sizes.append(rest)
    return sorted(sizes, reverse=True)


def _shuffled(adapters: list[int | None], draws: random.Random) -> list[int | None]:
    draws.shuffle(adapters)
    return adapters
