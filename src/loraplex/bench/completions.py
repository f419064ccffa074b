"""OpenAI's /v1/completions, streamed: the request of a benchmark, and its stream.

Prompts are token ids and the end token is ignored, so lengths are exactly those of the workload.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from loraplex.bench.workload import PlannedRequest
from loraplex.core.environment import KEY_HINT, client_headers
from loraplex.core.errors import ConfigError


@dataclasses.dataclass(slots=True)
class Exchange:
    """An in-flight request, with the bytes of its response. Filled by the sender."""

    request: PlannedRequest
    chunks: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    """(time.perf_counter_ns(), what arrived), each as it arrives and not yet parsed."""
    error: str | None = None
    start_ns: int = 0
    """When it was due; set by the load generator, as is end_ns."""
    end_ns: int = 0


class StreamedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed response of a finished exchange."""

    chunk_ns: tuple[int, ...] = ()
    """When each chunk with at least one new token arrived. A chunk may hold several tokens."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens from a prefix cache; should be 0 everywhere."""
    num_output_tokens: int = 0
    text: str = ""
    """Text of the output tokens."""
    error: str | None = None


_CONNECT_SECONDS = 10.0
_READ_SECONDS = 600.0
_MAX_ERROR_LENGTH = 300
_COMMENT = b":"


class StreamingClient:
    """One connection pool to one server, made and used in one event loop.

    On aiohttp, whose parser is in C: the load generator shares the cores with the server that it
    measures, and httpx, whose parser is in Python, takes four times the time for each chunk.
    """

    def __init__(self, url: str, *, reuses_connections: bool = True) -> None:
        """reuses_connections: False for a server that closes them when it likes."""
        self._url = url.rstrip("/")
        # The session ignores proxies of the environment, which would be measured with the server.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not reuses_connections),
            headers={"content-type": "application/json", **client_headers()},
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
            ),
        )

    async def stream(self, path: str, body: bytes, exchange: Exchange) -> None:
        """POST the body; what comes back, or why nothing does, goes into the exchange."""
        try:
            async with self._request("POST", path, data=body) as response:
                if _is_success(response):
                    async for data in response.content.iter_any():
                        exchange.chunks.append((time.perf_counter_ns(), data))
                else:
                    exchange.error = _refusal(response, await response.read())
        except aiohttp.ClientError as error:
            exchange.error = f"{type(error).__name__}: {error}"

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send one plain request; return the decoded JSON response, None if it is not JSON.

        Raises ConfigError if it fails.
        """
        try:
            async with self._request(method, path, json=body) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise ConfigError(f"cannot reach {self._url}: {error}") from error
        if not _is_success(response):
            raise ConfigError(f"{method} {path}: {_refusal(response, content)}")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            return None

    async def is_up(self, path: str) -> bool:
        """Return whether a GET of the path succeeds."""
        try:
            async with self._request("GET", path) as response:
                return _is_success(response)
        except aiohttp.ClientError:
            return False

    async def close(self) -> None:
        await self._http.close()

    def _request(
        self, method: str, path: str, **body: Any
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._http.request(method, self._url + path, allow_redirects=False, **body)


def lines(exchange: Exchange) -> Iterator[tuple[int, bytes]]:
    """The non-empty lines of what came back, each with the time when its end arrived.

    Without the comments of an event stream, by which a slow server keeps a connection alive.
    """
    rest = b""
    for arrived_ns, data in exchange.chunks:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if _has_content(line.strip()):
                yield arrived_ns, line.strip()
    if _has_content(rest.strip()):
        yield exchange.chunks[-1][0], rest.strip()


def _has_content(line: bytes) -> bool:
    return bool(line) and not line.startswith(_COMMENT)


def _is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


def _refusal(response: aiohttp.ClientResponse, content: bytes) -> str:
    """Return the status and the message of an error, with what to do without a valid key."""
    try:
        message = str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = content.decode(errors="replace")
    hint = f"; {KEY_HINT}" if response.status == HTTPStatus.UNAUTHORIZED else ""
    return f"status {response.status}: {message[:_MAX_ERROR_LENGTH]}{hint}"


PATH = "/v1/completions"
_DATA = b"data:"
_DONE = b"[DONE]"


def completion_body(model: str, request: PlannedRequest) -> bytes:
    """model: the base, or an adapter of it, as the server names them."""
    return msgspec.json.encode(
        {
            "model": model,
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


def read_completion(exchange: Exchange) -> StreamedCompletion:
    """Read a stream, with its usage at the end."""
    chunk_ns: list[int] = []
    text: list[str] = []
    usage = _Usage()
    error = exchange.error
    for arrived_ns, line in lines(exchange):
        data = line.removeprefix(_DATA).strip()
        if data == _DONE or not line.startswith(_DATA):
            continue
        chunk = _parse(data)
        if chunk.error is not None:
            error = f"the stream broke: {str(chunk.error)[:_MAX_ERROR_LENGTH]}"
        if chunk.choices:
            chunk_ns.append(arrived_ns)
            text.extend(choice.text or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    details = usage.prompt_tokens_details
    return StreamedCompletion(
        chunk_ns=tuple(chunk_ns),
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=0 if details is None else details.cached_tokens or 0,
        num_output_tokens=usage.completion_tokens,
        text="".join(text),
        error=error,
    )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None


class _Chunk(msgspec.Struct):
    """What matters of a chunk of the stream: choices, and at its end the usage or an error."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


def _parse(data: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        return _Chunk(error=f"{data!r} is not a chunk: {error}")
