"""Requests sent to a running system as their load says, and what became of them."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from loraplex.bench.exchange import Answer, Exchange
from loraplex.bench.statistics import RequestRecord
from loraplex.bench.workload import PlannedRequest


class Sender(Protocol):
    """What takes requests: of a system, that is all that a load needs."""

    async def send(self, exchange: Exchange) -> None:
        """As systems.Running.send."""
        ...


async def exchange_all(
    sender: Sender, requests: Sequence[PlannedRequest], concurrency: int | None
) -> tuple[list[Exchange], int]:
    """The finished exchanges, and when the first could be sent (ns)."""
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


def record_of(exchange: Exchange, answer: Answer) -> RequestRecord:
    """What is not as long as it was asked to be counts as failed."""
    return RequestRecord(
        start_ns=exchange.start_ns,
        chunk_ns=answer.chunk_ns,
        end_ns=exchange.end_ns,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        num_output_tokens=answer.num_output_tokens,
        error=answer.error or _wrong_length(answer, exchange.request),
    )


def _wrong_length(answer: Answer, request: PlannedRequest) -> str | None:
    asked = (len(request.prompt_token_ids), request.num_output_tokens)
    counted = (answer.num_prompt_tokens, answer.num_output_tokens)
    if counted == asked:
        return None
    return f"asked for {asked[0]} + {asked[1]} tokens, the answer has {counted[0]} + {counted[1]}"
