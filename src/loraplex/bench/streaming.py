"""The load generator's side of any HTTP server that streams: one POST for a request, and what
comes back kept as it arrives.

Nothing is parsed here: `Exchange.chunks` holds the bytes with their times, and `lines` gives the
lines of them when the run is over.
"""

import ssl
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from loraplex.bench.exchange import Exchange
from loraplex.core.environment import client_headers
from loraplex.core.errors import ConfigError

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 600.0
_MAX_ERROR_LENGTH = 300
_COMMENT = b":"


class StreamingClient:
    """One connection pool to one server."""

    def __init__(self, url: str, *, reuses_connections: bool = True) -> None:
        """reuses_connections: False for a server that closes them when it likes.

        Raises ConfigError if the url is none.
        """
        headers = {"content-type": "application/json", **client_headers()}
        if not reuses_connections:
            headers["connection"] = "close"
        try:
            base_url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"cannot reach {url}: {error}") from error
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            verify=ssl.create_default_context(),
            timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # A proxy of the environment would be measured along with the server.
            trust_env=False,
        )

    async def stream(self, path: str, body: bytes, exchange: Exchange) -> None:
        """POST the body; what comes back, or why nothing does, goes into the exchange."""
        try:
            async with self._http.stream("POST", path, content=body) as response:
                if response.is_success:
                    async for data in response.aiter_raw():
                        exchange.chunks.append((time.perf_counter_ns(), data))
                else:
                    await response.aread()
                    exchange.error = _refusal(response)
        except httpx.HTTPError as error:
            exchange.error = f"{type(error).__name__}: {error}"

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send one plain request; return the decoded JSON response, None if it is not JSON.

        Raises ConfigError if it fails.
        """
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ConfigError(f"cannot reach {self._http.base_url}: {error}") from error
        if not response.is_success:
            raise ConfigError(f"{method} {path}: {_refusal(response)}")
        try:
            return msgspec.json.decode(response.content)
        except msgspec.DecodeError:
            return None

    async def is_up(self, path: str) -> bool:
        """Return whether a GET of the path succeeds."""
        try:
            return (await self._http.get(path)).is_success
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        await self._http.aclose()


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


def _refusal(response: httpx.Response) -> str:
    return f"status {response.status_code}: {response.text[:_MAX_ERROR_LENGTH]}"
