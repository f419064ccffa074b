"""A server under load: discovery of its models, and the requests of a run.

While a run lasts, bytes are only kept with their times. They are parsed when it is over, so that
the client takes as little of the machine as possible.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec

from loraplex.bench.arrivals import Arrivals, ClosedLoop
from loraplex.bench.completions import (
    PATH,
    Exchange,
    StreamedCompletion,
    StreamingClient,
    completion_body,
    read_completion,
)
from loraplex.bench.statistics import RequestRecord
from loraplex.bench.workload import PlannedRequest
from loraplex.core.errors import ConfigError

Send = Callable[[Exchange], Awaitable[None]]
"""Sends a request to a system under load, and fills the exchange."""


async def exchange_all(
    send: Send, requests: Sequence[PlannedRequest], concurrency: int | None
) -> tuple[list[Exchange], int]:
    """Return the finished exchanges, and when the first could be sent (ns)."""
    exchanges = [Exchange(request) for request in requests]
    start_ns = time.perf_counter_ns()
    async with asyncio.TaskGroup() as tasks:
        if concurrency is None:
            for exchange in exchanges:
                tasks.create_task(_send_when_due(send, exchange, start_ns))
        else:
            queue = iter(exchanges)
            for _ in range(concurrency):
                tasks.create_task(_send_in_turn(send, queue))
    return exchanges, start_ns


async def _send_in_turn(send: Send, queue: Iterator[Exchange]) -> None:
    """One client of a closed loop. All clients share the queue."""
    for exchange in queue:
        exchange.start_ns = time.perf_counter_ns()
        await _timed(send, exchange)


async def _send_when_due(send: Send, exchange: Exchange, start_ns: int) -> None:
    # Latency counts from the due time, so a late client cannot hide a slow server.
    exchange.start_ns = start_ns + int(exchange.request.due_seconds * 1e9)
    await asyncio.sleep((exchange.start_ns - time.perf_counter_ns()) / 1e9)
    await _timed(send, exchange)


async def _timed(send: Send, exchange: Exchange) -> None:
    await send(exchange)
    exchange.end_ns = time.perf_counter_ns()


def record_of(exchange: Exchange, completion: StreamedCompletion) -> RequestRecord:
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


def _wrong_length(completion: StreamedCompletion, request: PlannedRequest) -> str | None:
    requested = (len(request.prompt_token_ids), request.num_output_tokens)
    counted = (completion.num_prompt_tokens, completion.num_output_tokens)
    if counted == requested:
        return None
    return (
        f"requested {requested[0]} + {requested[1]} tokens, "
        f"the completion has {counted[0]} + {counted[1]}"
    )


# Words of many tokens: the prompts are drawn from their ids, which any tokenizer has.
_VOCABULARY_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix 123 potions. "
    "Which capital cities lie on a river? Write the name below, then explain it."
)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and what it serves."""

    url: str
    base: str
    adapters: tuple[str, ...]
    """Adapters of the base model, by the server's names."""
    max_model_len: int | None
    vocabulary: tuple[int, ...]
    """Token ids to write prompts with."""

    def model(self, request: PlannedRequest) -> str:
        """Return the request's `model` field."""
        return self.base if request.adapter is None else self.adapters[request.adapter]


async def discover(url: str) -> Target:
    """Find out what a server serves. Raises ConfigError."""
    client = StreamingClient(url)
    try:
        entries = (await _call(client, "GET", "/v1/models"))["data"]
        base = next((entry for entry in entries if not entry.get("parent")), None)
        if base is None:
            raise ConfigError(f"{url} lists no base model under /v1/models")
        body = {"model": base["id"], "prompt": _VOCABULARY_TEXT, "add_special_tokens": False}
        token_ids = (await _call(client, "POST", "/tokenize", body))["tokens"]
    finally:
        await client.close()
    return Target(
        url=url,
        base=base["id"],
        adapters=tuple(entry["id"] for entry in entries if entry.get("parent") == base["id"]),
        max_model_len=base.get("max_model_len"),
        vocabulary=tuple(sorted(set(token_ids))),
    )


async def run(
    target: Target, requests: Sequence[PlannedRequest], arrivals: Arrivals
) -> tuple[int, list[RequestRecord]]:
    """Send the requests as they arrive: (start of the run in ns, a record of each).

    A request that fails has its error in its record; the others go on.
    """
    concurrency = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None
    client = StreamingClient(target.url)

    async def send(exchange: Exchange) -> None:
        body = completion_body(target.model(exchange.request), exchange.request)
        await client.stream(PATH, body, exchange)

    try:
        exchanges, start_ns = await exchange_all(send, requests, concurrency)
    finally:
        await client.close()
    return start_ns, [record_of(exchange, read_completion(exchange)) for exchange in exchanges]


async def _call(
    client: StreamingClient, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    response = await client.call(method, path, body)
    if not isinstance(response, dict):
        raise ConfigError(f"the response to {method} {path} is not a JSON object")
    return response
