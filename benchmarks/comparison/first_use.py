"""Cost of the first use of an adapter: the time to its first token, minus that of later uses.

Timed from the call that makes the adapter known to the first token of a request for it, less the
median time to first token of the same prompt length when the adapter is warm. The file is in the
page cache. `is_known`: the server had this very adapter once before and has forgotten it, so
that it may know the file's digest; else its bytes are new to the server.
"""

import random
import statistics
import time

import msgspec

from comparison.systems import Adapter, Running
from loraplex.bench.client import exchange_all
from loraplex.bench.workload import PlannedRequest
from loraplex.core.errors import ConfigError

_NUM_WARM = 5
_PROMPT_TOKENS = 128


class FirstUse(msgspec.Struct, frozen=True, kw_only=True, tag="first-use"):
    """What to measure."""

    rank: int
    is_known: bool

    def __str__(self) -> str:
        return f"first use, rank {self.rank}, digest {'known' if self.is_known else 'unknown'}"


class FirstUseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds."""

    cold_seconds: float
    """Time from making the adapter known to its first token."""
    register_seconds: float
    """Part of it until requests could be sent."""
    warm_seconds: float
    """Median time to first token afterwards."""

    @property
    def extra_seconds(self) -> float:
        return self.cold_seconds - self.warm_seconds


async def measure_first_use(
    running: Running, adapter: Adapter, vocabulary: range, *, is_known: bool
) -> FirstUseFigures:
    """Leaves the adapter removed. Raises ConfigError, UnsupportedFeatureError."""
    prompts = iter(_prompts(vocabulary, 3 + _NUM_WARM))
    _read_once(adapter)
    if is_known:
        index = await running.add_adapter(adapter)
        await _first_token_ns(running, next(prompts), index)
        await running.remove_adapter(index)
    # The base runs first, so that what is timed is not the wake-up of an idle server.
    await _first_token_ns(running, next(prompts), None)
    start_ns = time.perf_counter_ns()
    index = await running.add_adapter(adapter)
    registered_ns = time.perf_counter_ns()
    _, first_ns = await _first_token_ns(running, next(prompts), index)
    warm = [await _first_token_ns(running, prompt, index) for prompt in prompts]
    await running.remove_adapter(index)
    return FirstUseFigures(
        cold_seconds=(first_ns - start_ns) / 1e9,
        register_seconds=(registered_ns - start_ns) / 1e9,
        warm_seconds=statistics.median(first - sent for sent, first in warm) / 1e9,
    )


async def _first_token_ns(
    running: Running, prompt: tuple[int, ...], adapter: int | None
) -> tuple[int, int]:
    """When the request was sent, and when its first token came."""
    exchanges, _ = await exchange_all(running.send, [PlannedRequest(prompt, 2, adapter, 0.0)], 1)
    completion = running.read(exchanges[0])
    if completion.error or not completion.chunk_ns:
        raise ConfigError(f"the request failed: {completion.error or 'it has no completion'}")
    return exchanges[0].start_ns, completion.chunk_ns[0]


def _prompts(vocabulary: range, count: int) -> list[tuple[int, ...]]:
    # Never the same twice, in whatever process: a prefix cache must have nothing to give.
    draws = random.SystemRandom()
    return [tuple(draws.choices(vocabulary, k=_PROMPT_TOKENS)) for _ in range(count)]


def _read_once(adapter: Adapter) -> None:
    """Read files into the page cache."""
    for file in adapter.path.iterdir():
        file.read_bytes()
