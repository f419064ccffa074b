"""What is asked of a server, and when: how many requests, how long, for which adapters.

A `Workload` is a value that a report can hold; `generate` turns it into requests, and nothing but
the value and the number of the repeat decides them. Knows no server and no wire.
"""

import math
import random
from collections.abc import Sequence

import msgspec

from loraplex.core.errors import ConfigError


class BaseOnly(msgspec.Struct, frozen=True, tag="base"):
    """No adapter at all: what the others are compared with."""

    def __str__(self) -> str:
        return "base"


class Identical(msgspec.Struct, frozen=True, tag="identical"):
    """Every request asks for the first adapter."""

    def __str__(self) -> str:
        return "identical"


class Uniform(msgspec.Struct, frozen=True, tag="uniform"):
    """Every request draws one of the adapters, all equally likely."""

    def __str__(self) -> str:
        return "uniform"


class Distinct(msgspec.Struct, frozen=True, tag="distinct"):
    """The adapters in turn: any `num_adapters` successive requests ask for as many adapters."""

    def __str__(self) -> str:
        return "distinct"


class Zipf(msgspec.Struct, frozen=True, tag="zipf"):
    """Adapter k (from 1) is drawn with a probability proportional to k ** -exponent.

    Zipf's law itself; some benchmarks call a geometric rule (exponent ** -k) by this name.
    """

    exponent: float

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}"


Popularity = BaseOnly | Identical | Uniform | Distinct | Zipf


class Burst(msgspec.Struct, frozen=True, tag="burst"):
    """All requests at once."""

    def __str__(self) -> str:
        return "burst"


class ClosedLoop(msgspec.Struct, frozen=True, tag="closed"):
    """`concurrency` clients, each sending its next request when the last one was answered."""

    concurrency: int

    def __str__(self) -> str:
        return f"closed:{self.concurrency}"


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """Independent arrivals at a mean rate, whether or not earlier requests were answered."""

    requests_per_second: float

    def __str__(self) -> str:
        return f"poisson:{self.requests_per_second:g}"


Arrivals = Burst | ClosedLoop | Poisson


class Lengths(msgspec.Struct, frozen=True):
    """Token counts, uniform in [low, high]."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    popularity: Popularity
    num_adapters: int
    arrivals: Arrivals
    seed: int


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request to send."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    adapter: int | None
    """Index of the adapter; None is the base model."""
    due_seconds: float
    """When to send it, from the start of the run. A closed loop sends when a client is free."""


def generate(workload: Workload, repeat: int, vocabulary: Sequence[int]) -> list[PlannedRequest]:
    """The requests of one repeat.

    Lengths and arrival times follow from the seed and the repeat alone, so that workloads which
    differ in popularity are asked the same. Prompts are drawn from `vocabulary` anew for every
    workload and repeat, so that no run finds its prompts in the server's prefix cache.
    """
    moment = f"{workload.seed}/{repeat}"
    num_requests = workload.num_requests
    prompt_lengths = draw_lengths(workload.prompt_tokens, num_requests, f"{moment}/prompts")
    output_lengths = draw_lengths(workload.output_tokens, num_requests, f"{moment}/outputs")
    adapters = draw_adapters(workload, f"{moment}/adapters")
    due = draw_arrivals(workload.arrivals, num_requests, f"{moment}/arrivals")
    tokens = random.Random(msgspec.json.encode(workload) + moment.encode())
    return [
        PlannedRequest(
            prompt_token_ids=tuple(tokens.choices(vocabulary, k=prompt_length)),
            num_output_tokens=output_length,
            adapter=adapter,
            due_seconds=due_seconds,
        )
        for prompt_length, output_length, adapter, due_seconds in zip(
            prompt_lengths, output_lengths, adapters, due, strict=True
        )
    ]


def draw_lengths(lengths: Lengths, count: int, seed: str) -> list[int]:
    draws = random.Random(seed)
    return [draws.randint(lengths.low, lengths.high) for _ in range(count)]


def draw_adapters(workload: Workload, seed: str) -> list[int | None]:
    """An adapter's index for each request; None for the base model."""
    count, num_adapters = workload.num_requests, workload.num_adapters
    match workload.popularity:
        case BaseOnly():
            return [None] * count
        case Identical():
            return [0] * count
        case Distinct():
            return [index % num_adapters for index in range(count)]
        case Uniform():
            weights = [1.0] * num_adapters
        case Zipf(exponent):
            weights = [rank**-exponent for rank in range(1, num_adapters + 1)]
    return [*random.Random(seed).choices(range(num_adapters), weights, k=count)]


def draw_arrivals(arrivals: Arrivals, count: int, seed: str) -> list[float]:
    """Seconds from the start of the run; all 0 unless the arrivals are Poisson."""
    if not isinstance(arrivals, Poisson):
        return [0.0] * count
    draws = random.Random(seed)
    due, times = 0.0, []
    for _ in range(count):
        due += draws.expovariate(arrivals.requests_per_second)
        times.append(due)
    return times


def parse_popularity(text: str) -> Popularity:
    """`identical`, `uniform`, `distinct` or `zipf:S`. Raises ConfigError."""
    plain: dict[str, Popularity] = {
        str(popularity): popularity for popularity in (Identical(), Uniform(), Distinct())
    }
    kind, _, value = text.partition(":")
    if text in plain:
        return plain[text]
    if kind == "zipf":
        return Zipf(_positive(value, f"popularity {text!r}"))
    raise ConfigError(f"popularity must be {', '.join(plain)} or zipf:S, got {text!r}")


def parse_arrivals(text: str) -> Arrivals:
    """`closed:CONCURRENCY`, `burst` or `poisson:REQUESTS_PER_SECOND`. Raises ConfigError."""
    kind, _, value = text.partition(":")
    if text == "burst":
        return Burst()
    if kind == "closed":
        return ClosedLoop(_count(value, f"load {text!r}"))
    if kind == "poisson":
        return Poisson(_positive(value, f"load {text!r}"))
    raise ConfigError(f"load must be closed:CONCURRENCY, burst or poisson:RATE, got {text!r}")


def parse_lengths(text: str) -> Lengths:
    """`32`, or `16-64` for a uniform draw, both ends included. Raises ConfigError."""
    low, dash, high = text.partition("-")
    label = f"length {text!r}"
    lengths = Lengths(_count(low, label), _count(high if dash else low, label))
    if lengths.low > lengths.high:
        raise ConfigError(f"{label}: the first number must not exceed the second")
    return lengths


def _count(text: str, label: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ConfigError(f"{label} needs whole numbers from 1, got {text!r}")
    return int(text)


def _positive(text: str, label: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{label} needs a number above 0, got {text!r}")
    return value
