"""The load generator's side of any HTTP server that streams: one POST for a request, and what
comes back kept as it arrives.

Nothing is parsed here: `Exchange.chunks` holds the bytes with their times, and `lines` gives the
lines of them when the run is over.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec

from loraplex.bench.exchange import Exchange
from loraplex.core.environment import client_headers
from loraplex.core.errors import ConfigError

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
    return f"status {response.status}: {content.decode(errors='replace')[:_MAX_ERROR_LENGTH]}"
