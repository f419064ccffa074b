"""A server under load: discovery of its models, and the requests of a run.

While a run lasts, bytes are only kept with their times. They are parsed when it is over, so that
the client takes as little of the machine as possible.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from loraplex.bench.arrivals import Arrivals, ClosedLoop
from loraplex.bench.completions import PATH, completion_body, read_completion
from loraplex.bench.exchange import Exchange
from loraplex.bench.load_generator import exchange_all, record_of
from loraplex.bench.statistics import RequestRecord
from loraplex.bench.streaming import StreamingClient
from loraplex.bench.workload import PlannedRequest
from loraplex.core.errors import ConfigError

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
    subject = _Subject(target)
    try:
        exchanges, start_ns = await exchange_all(subject, requests, concurrency)
    finally:
        await subject.close()
    return start_ns, [record_of(exchange, read_completion(exchange)) for exchange in exchanges]


class _Subject:
    """Implements load_generator.Sender."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = StreamingClient(target.url)

    async def send(self, exchange: Exchange) -> None:
        body = completion_body(self._target.model(exchange.request), exchange.request)
        await self._client.stream(PATH, body, exchange)

    async def close(self) -> None:
        await self._client.close()


async def _call(
    client: StreamingClient, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    response = await client.call(method, path, body)
    if not isinstance(response, dict):
        raise ConfigError(f"the response to {method} {path} is not a JSON object")
    return response
