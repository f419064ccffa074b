"""Requests sent to a running system at the times of their load, and their records."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from loraplex.bench.exchange import Completion, Exchange
from loraplex.bench.statistics import RequestRecord
from loraplex.bench.workload import PlannedRequest


class Sender(Protocol):
    """The part of a system that a load needs: it takes requests."""

    async def send(self, exchange: Exchange) -> None:
        """Send a request and fill the exchange."""
        ...


async def exchange_all(
    sender: Sender, requests: Sequence[PlannedRequest], concurrency: int | None
) -> tuple[list[Exchange], int]:
    """Return the finished exchanges, and when the first could be sent (ns)."""
    exchanges = [Exchange(request) for request in requests]
    start_ns = time.perf_counter_ns()
    async with asyncio.TaskGroup() as tasks:
        if concurrency is None:
            for exchange in exchanges:
                tasks.create_task(_send_when_due(sender, exchange, start_ns))
        else:
            queue = iter(exchanges)
            for _ in range(concurrency):
                tasks.create_task(_send_in_turn(sender, queue))
    return exchanges, start_ns


async def _send_in_turn(sender: Sender, queue: Iterator[Exchange]) -> None:
    """One client of a closed loop. All clients share the queue."""
    for exchange in queue:
        exchange.start_ns = time.perf_counter_ns()
        await _send(sender, exchange)


async def _send_when_due(sender: Sender, exchange: Exchange, start_ns: int) -> None:
    # Latency counts from the due time, so a late client cannot hide a slow server.
    exchange.start_ns = start_ns + int(exchange.request.due_seconds * 1e9)
    await asyncio.sleep((exchange.start_ns - time.perf_counter_ns()) / 1e9)
    await _send(sender, exchange)


async def _send(sender: Sender, exchange: Exchange) -> None:
    await sender.send(exchange)
    exchange.end_ns = time.perf_counter_ns()


def record_of(exchange: Exchange, completion: Completion) -> RequestRecord:
    """Return the record of a request. A completion of another length than requested has failed."""
    return RequestRecord(
        start_ns=exchange.start_ns,
        chunk_ns=completion.chunk_ns,
        end_ns=exchange.end_ns,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=completion.num_output_tokens,
        error=completion.error or _wrong_length(completion, exchange.request),
    )


def _wrong_length(completion: Completion, request: PlannedRequest) -> str | None:
    requested = (len(request.prompt_token_ids), request.num_output_tokens)
    counted = (completion.num_prompt_tokens, completion.num_output_tokens)
    if counted == requested:
        return None
    return (
        f"requested {requested[0]} + {requested[1]} tokens, "
        f"the completion has {counted[0]} + {counted[1]}"
    )
