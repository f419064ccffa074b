"""What a server logs about itself while it starts and while it is under load."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final

from loraplex.core.counts import counted
from loraplex.core.stats import EngineStats
from loraplex.serving.draining import DrainReport

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS: Final = 5.0
_THROUGHPUT_SECONDS: Final = 10.0

Stats = Callable[[], Mapping[str, EngineStats]]
"""Returns the present numbers of each model's engine."""


@contextlib.asynccontextmanager
async def logging_progress(seconds: float = _PROGRESS_SECONDS) -> AsyncIterator[None]:
    """Log every few seconds that the server is still loading."""
    async with _repeating(_log_progress(seconds)):
        yield


@contextlib.asynccontextmanager
async def logging_throughput(
    stats: Stats, seconds: float = _THROUGHPUT_SECONDS
) -> AsyncIterator[None]:
    """Log the throughput of each model that had work, every few seconds."""
    async with _repeating(_log_throughput(stats, seconds)):
        yield


@contextlib.asynccontextmanager
async def logging_drain(
    report: Callable[[], DrainReport], seconds: float = _PROGRESS_SECONDS
) -> AsyncIterator[None]:
    """Log every few seconds what a server that stops waits for."""
    async with _repeating(_log_drain(report, seconds)):
        yield


def throughput(model: str, before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Return a line for the time between two snapshots; empty without work."""
    # The counters of an engine that was started again begin at 0.
    prompt = max(now.prompt_tokens - before.prompt_tokens, 0)
    output = max(now.generation_tokens - before.generation_tokens, 0)
    cached = max(now.cached_tokens - before.cached_tokens, 0)
    if not (prompt or output or now.num_running or now.num_waiting):
        return ""
    hits = f", {cached / prompt:.0%} of the prompt tokens cached" if prompt else ""
    return (
        f"{model}: {prompt / seconds:.1f} prompt and {output / seconds:.1f} output tokens/s; "
        f"{now.num_running} running, {now.num_waiting} waiting; KV cache {now.kv_usage:.0%} used"
        f"{hits}; {now.adapters.num_on_device} adapters on the device"
    )


async def _log_progress(seconds: float) -> None:
    passed = 0.0
    while True:
        await asyncio.sleep(seconds)
        passed += seconds
        logger.info("still loading, %.0f s so far", passed)


async def _log_drain(report: Callable[[], DrainReport], seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        now = report()
        logger.info(
            "still stopping: %s %.0f s left",
            counted(now.in_work, "in-flight prompt has", "in-flight prompts have"),
            now.seconds_left or 0.0,
        )


async def _log_throughput(stats: Stats, seconds: float) -> None:
    before = stats()
    while True:
        await asyncio.sleep(seconds)
        now = stats()
        for model, present in now.items():
            if line := throughput(model, before.get(model, EngineStats()), present, seconds):
                logger.info("%s", line)
        before = now


@contextlib.asynccontextmanager
async def _repeating(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
