"""The load generator's side of the wire: OpenAI's /v1/completions, streamed over HTTP.

Prompts are token ids and the end token is ignored, so lengths are exactly those of the workload.
While a run lasts, lines are only kept with their times; they are parsed when it is over, so that
the client takes as little of the machine as it can.
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec

from loraplex.bench.arrivals import Arrivals, ClosedLoop
from loraplex.bench.statistics import RequestRecord
from loraplex.bench.workload import PlannedRequest
from loraplex.core.errors import ConfigError

# Words of many tokens: the prompts are drawn from their ids, which any tokenizer has.
_VOCABULARY_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix 123 potions. "
    "Which capital cities lie on a river? Write the answer below, then explain it."
)
_CONNECT_SECONDS = 10.0
_READ_SECONDS = 600.0
_DATA = "data:"
_DONE = "[DONE]"
_MAX_ERROR_LENGTH = 300


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and what it serves."""

    url: str
    base: str
    adapters: tuple[str, ...]
    """Of the base model, as the server names them."""
    max_model_len: int | None
    vocabulary: tuple[int, ...]
    """Token ids to write prompts with."""

    def model(self, request: PlannedRequest) -> str:
        """What the request's `model` field says."""
        return self.base if request.adapter is None else self.adapters[request.adapter]


async def discover(url: str) -> Target:
    """Ask a server what it serves. Raises ConfigError."""
    async with _connect(url) as http:
        entries = (await _ask(http, "GET", "/v1/models"))["data"]
        base = next((entry for entry in entries if not entry.get("parent")), None)
        if base is None:
            raise ConfigError(f"{url} lists no base model under /v1/models")
        body = {"model": base["id"], "prompt": _VOCABULARY_TEXT, "add_special_tokens": False}
        token_ids = (await _ask(http, "POST", "/tokenize", body))["tokens"]
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
    exchanges = [_Exchange(_body(target, request), request) for request in requests]
    async with _connect(target.url) as http:
        start_ns = time.perf_counter_ns()
        async with asyncio.TaskGroup() as tasks:
            if isinstance(arrivals, ClosedLoop):
                queue = iter(exchanges)
                for _ in range(arrivals.concurrency):
                    tasks.create_task(_send_in_turn(http, queue))
            else:
                for exchange in exchanges:
                    tasks.create_task(_send_when_due(http, exchange, start_ns))
    return start_ns, [_record(exchange) for exchange in exchanges]


@dataclasses.dataclass(slots=True)
class _Exchange:
    """A request under way: what was sent, and what came back when."""

    body: bytes
    request: PlannedRequest
    start_ns: int = 0
    end_ns: int = 0
    lines: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    error: str | None = None


async def _send_in_turn(http: httpx.AsyncClient, queue: Iterator[_Exchange]) -> None:
    """One client of a closed loop. All clients share the queue."""
    for exchange in queue:
        exchange.start_ns = time.perf_counter_ns()
        await _send(http, exchange)


async def _send_when_due(http: httpx.AsyncClient, exchange: _Exchange, start_ns: int) -> None:
    # Latency counts from the due time, so a late client cannot hide a slow server.
    exchange.start_ns = start_ns + int(exchange.request.due_seconds * 1e9)
    await asyncio.sleep((exchange.start_ns - time.perf_counter_ns()) / 1e9)
    await _send(http, exchange)


async def _send(http: httpx.AsyncClient, exchange: _Exchange) -> None:
    try:
        async with http.stream("POST", "/v1/completions", content=exchange.body) as response:
            if response.is_success:
                async for line in response.aiter_lines():
                    if line.startswith(_DATA):
                        exchange.lines.append((time.perf_counter_ns(), line))
            else:
                await response.aread()
                exchange.error = _refusal(response)
    except httpx.HTTPError as error:
        exchange.error = f"{type(error).__name__}: {error}"
    exchange.end_ns = time.perf_counter_ns()


def _connect(url: str) -> httpx.AsyncClient:
    """Raises ConfigError if url is none."""
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"cannot ask {url}: {error}") from error
    return httpx.AsyncClient(
        base_url=url,
        headers={"content-type": "application/json"},
        timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        # A proxy of the environment would be measured along with the server.
        trust_env=False,
    )


async def _ask(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        response = await http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise ConfigError(f"cannot ask {http.base_url}: {error}") from error
    if not response.is_success:
        raise ConfigError(f"{method} {http.base_url}{path.lstrip('/')}: {_refusal(response)}")
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{http.base_url}{path.lstrip('/')} is not JSON: {error}") from error


def _refusal(response: httpx.Response) -> str:
    return f"status {response.status_code}: {response.text[:_MAX_ERROR_LENGTH]}"


def _body(target: Target, request: PlannedRequest) -> bytes:
    return msgspec.json.encode(
        {
            "model": target.model(request),
            "prompt": request.prompt_token_ids,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # A server may leave out a chunk without text, so that its token would go unseen.
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class _Chunk(msgspec.Struct):
    """What matters of a chunk of the stream: choices, and at its end the usage or an error."""

    choices: list[Any] = []
    usage: dict[str, Any] | None = None
    error: Any = None


def _record(exchange: _Exchange) -> RequestRecord:
    """Parse what came back. What is not as long as it was asked to be counts as failed."""
    chunk_ns: list[int] = []
    usage: dict[str, Any] = {}
    error = exchange.error
    for arrived_ns, line in exchange.lines:
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            break
        chunk = _parse_chunk(data)
        if chunk.error is not None:
            error = f"the stream broke: {str(chunk.error)[:_MAX_ERROR_LENGTH]}"
        if chunk.choices:
            chunk_ns.append(arrived_ns)
        usage = chunk.usage or usage
    record = RequestRecord(
        start_ns=exchange.start_ns,
        chunk_ns=tuple(chunk_ns),
        end_ns=exchange.end_ns,
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_output_tokens=usage.get("completion_tokens") or 0,
    )
    return msgspec.structs.replace(record, error=error or _wrong_length(record, exchange.request))


def _parse_chunk(data: str) -> _Chunk:
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        return _Chunk(error=f"{data!r} is not a chunk: {error}")


def _wrong_length(record: RequestRecord, request: PlannedRequest) -> str | None:
    asked = (len(request.prompt_token_ids), request.num_output_tokens)
    counted = (record.num_prompt_tokens, record.num_output_tokens)
    if counted == asked:
        return None
    return f"asked for {asked[0]} + {asked[1]} tokens, the usage says {counted[0]} + {counted[1]}"
