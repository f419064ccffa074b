"""Workloads: how many requests, how long, for which adapters, and when.

A `Workload` is a value that a report can hold; `generate` turns it into requests, and nothing but
the value and the number of the repeat decides them. It knows no server and no protocol.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from loraplex.bench import arrivals as arrival_times
from loraplex.bench import popularity as laws
from loraplex.bench.arrivals import Arrivals, Burst, ClosedLoop, Gamma, Poisson
from loraplex.bench.popularity import (
    Distinct,
    Geometric,
    Identical,
    Popularity,
    PowerFunction,
    Shuffled,
    SquareRoot,
    Uniform,
    Zipf,
)
from loraplex.core.errors import ConfigError


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

    @property
    def concurrency(self) -> int | None:
        """Clients of a closed loop; None: each request is sent when it is due."""
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else None


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
    differ in popularity have the same lengths and times. Prompts are drawn from `vocabulary` anew
    for every workload and repeat, so that no run finds its prompts in the server's prefix cache.
    """
    moment = f"{workload.seed}/{repeat}"
    num_requests = workload.num_requests
    prompt_lengths = draw_lengths(workload.prompt_tokens, num_requests, f"{moment}/prompts")
    output_lengths = draw_lengths(workload.output_tokens, num_requests, f"{moment}/outputs")
    adapters = laws.draw(
        workload.popularity, num_requests, workload.num_adapters, f"{moment}/adapters"
    )
    due = arrival_times.draw(workload.arrivals, num_requests, f"{moment}/arrivals")
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


def parse_popularity(text: str) -> Popularity:
    """`identical`, `uniform`, `distinct`, `shuffled`, `square-root`, `zipf:S`, `powerfunc:ALPHA` or
    `geometric:RATIO`. Raises ConfigError.
    """
    kind, _, value = text.partition(":")
    label = f"popularity {text!r}"
    plain: Mapping[str, Popularity] = {
        str(law): law for law in (Identical(), Uniform(), Distinct(), Shuffled(), SquareRoot())
    }
    if text in plain:
        return plain[text]
    laws: Mapping[str, Callable[[float], Popularity]] = {
        "zipf": Zipf,
        "powerfunc": PowerFunction,
        "geometric": Geometric,
    }
    if kind not in laws:
        raise ConfigError(
            f"popularity must be {', '.join(plain)}, zipf:S, powerfunc:ALPHA or geometric:RATIO, "
            f"got {text!r}"
        )
    number = _positive(value, label)
    if kind == "geometric" and number <= 1:
        raise ConfigError(f"{label} needs a ratio above 1")
    return laws[kind](number)


def parse_arrivals(text: str) -> Arrivals:
    """`closed:CONCURRENCY`, `burst`, `poisson:REQUESTS_PER_SECOND` or
    `gamma:REQUESTS_PER_SECOND,CV`. Raises ConfigError.
    """
    kind, _, value = text.partition(":")
    label = f"load {text!r}"
    if text == "burst":
        return Burst()
    if kind == "closed":
        return ClosedLoop(_count(value, label))
    if kind == "poisson":
        return Poisson(_positive(value, label))
    if kind == "gamma":
        rate, _, cv = value.partition(",")
        return Gamma(_positive(rate, label), _positive(cv, label))
    raise ConfigError(
        f"load must be closed:CONCURRENCY, burst, poisson:RATE or gamma:RATE,CV, got {text!r}"
    )


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
