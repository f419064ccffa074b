"""Files over http and https, by the standard library: each connection to a checked address.

Proxies of the environment are not used: behind one, no address could be checked.
"""

import contextlib
import http.client
import logging
import re
import ssl
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from loraplex.adapters.sources.download import Allowance, Arrived, Missing, write_stream
from loraplex.adapters.sources.policy import SourcePolicy, matches
from loraplex.adapters.sources.reference import shown
from loraplex.core.errors import AdapterLoadError, InvalidAdapterError, PermissionDeniedError
from loraplex.core.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT_SECONDS = 30.0
_MAX_REDIRECTS = 5
_NUM_TRIES = 4
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 10.0
_REDIRECTS = (301, 302, 303, 307, 308)
_LATER = (408, 425, 429, 500, 502, 503, 504)
_ABSENT = (404, 410)
_SHA256 = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?')
_HTTP_DATE = "last-modified "
"""Before a tag that is a date."""


class TryAgainError(Exception):
    """It may work in a moment."""

    def __init__(self, reason: str, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class _PlainConnection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, policy: SourcePolicy) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_SECONDS)
        self._policy = policy

    def connect(self) -> None:
        self.sock = self._policy.connect(self.host, self.port, _TIMEOUT_SECONDS)


class _TlsConnection(_PlainConnection):
    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        super().connect()
        context = ssl.create_default_context()
        self.sock = context.wrap_socket(self.sock, server_hostname=self.host)


class HttpClient:
    """Gets what the policy allows. `more_hosts` are allowed beside it, after a redirect."""

    def __init__(self, policy: SourcePolicy, more_hosts: tuple[str, ...] = ()) -> None:
        self._policy = policy
        self._more_hosts = more_hosts

    def download(
        self,
        url: str,
        target: Path,
        allowance: Allowance,
        known_tag: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Arrived | Missing:
        """Write a file, unless it still has the known tag.

        Raises InvalidAdapterError, PermissionDeniedError, AdapterTooLargeError, AdapterLoadError.
        """
        asked = {**(headers or {}), **_condition(known_tag)}

        def once() -> Arrived | Missing:
            with self._opened(url, asked) as (response, linked):
                if response.status in _ABSENT:
                    return Missing.ABSENT
                if response.status == 304 and known_tag:
                    return Missing.UNCHANGED
                return _received(response, linked, url, target, allowance)

        return _tried(once, url, allowance)

    def read(self, url: str, allowance: Allowance, headers: Mapping[str, str], most: int) -> bytes:
        """A short answer; empty if there is none. Raises as download."""

        def once() -> bytes:
            with self._opened(url, headers) as (response, _):
                if response.status in _ABSENT:
                    return b""
                _require_ok(response, url)
                body = response.read(most + 1)
                if len(body) > most:
                    raise InvalidAdapterError(f"{shown(url)} answers with more than {most} bytes")
                return body

        return _tried(once, url, allowance)

    @contextlib.contextmanager
    def _opened(
        self, url: str, headers: Mapping[str, str]
    ) -> Iterator[tuple[http.client.HTTPResponse, str | None]]:
        """The answer after redirects, and the SHA-256 that the hub told on the way, if it did."""
        asked = dict(headers)
        linked: str | None = None
        origin = urllib.parse.urlsplit(url)
        for hop in range(_MAX_REDIRECTS + 1):
            parts = urllib.parse.urlsplit(url)
            assert parts.hostname is not None
            if hop == 0 or not matches(parts.hostname, self._more_hosts):
                self._policy.check_host(parts.hostname)
            if (parts.scheme, parts.netloc) != (origin.scheme, origin.netloc):
                asked.pop("Authorization", None)  # it is for the first host alone
            with (
                contextlib.closing(_connection(parts, self._policy)) as connection,
                contextlib.closing(_response(connection, parts, asked)) as response,
            ):
                if response.status not in _REDIRECTS:
                    yield response, linked
                    return
                if hop == 0:
                    match = _SHA256.fullmatch(response.getheader("X-Linked-Etag", ""))
                    linked = match[1] if match else None
                url = _next_url(url, response.getheader("Location", ""))
        raise InvalidAdapterError(
            f"{shown(url)} is the end of more than {_MAX_REDIRECTS} redirects"
        )


def _tried(once: Callable[[], T], url: str, allowance: Allowance) -> T:
    """Once, and again after a pause while the reason may pass."""
    wait_seconds = _FIRST_WAIT_SECONDS
    for left in reversed(range(_NUM_TRIES)):
        try:
            return once()
        except (TryAgainError, OSError, http.client.HTTPException) as error:
            if isinstance(error, ssl.SSLCertVerificationError):
                raise InvalidAdapterError(f"{shown(url)}: {error.verify_message}") from error
            reason = " ".join(str(error).split()) or type(error).__name__
            if not left:
                raise AdapterLoadError(
                    f"{shown(url)} cannot be fetched now: {reason}; try again later"
                ) from error
            asked = error.wait_seconds if isinstance(error, TryAgainError) else None
            pause = min(asked or wait_seconds, _LONGEST_WAIT_SECONDS)
            logger.info("%s: %s; trying again in %.1f s", shown(url), reason, pause)
            allowance.wait(pause)
            wait_seconds *= 2
    raise AssertionError("unreachable: the last try returns or raises")


def _received(
    response: http.client.HTTPResponse,
    linked: str | None,
    url: str,
    target: Path,
    allowance: Allowance,
) -> Arrived:
    _require_ok(response, url)
    encoding = response.getheader("Content-Encoding", "identity")
    if encoding != "identity":
        raise InvalidAdapterError(f"{shown(url)} comes as {encoding}, which was not asked for")
    total = response.length  # by its header, which may lie
    allowance.require_room(total or 0)
    sha256, num_bytes = write_stream(response.read1, target, allowance, total)
    if total is not None and num_bytes != total:
        raise TryAgainError(f"it ended after {num_bytes} of {total} bytes")
    if linked is not None and sha256 != linked:
        raise TryAgainError(f"its SHA-256 is {sha256}, the hub says {linked}")
    allowance.spend(num_bytes)
    return Arrived(_tag(response), sha256, num_bytes)


def _require_ok(response: http.client.HTTPResponse, url: str) -> None:
    status = response.status
    if status in _LATER:
        after = response.getheader("Retry-After", "")
        raise TryAgainError(
            f"it answers {status} {response.reason}", float(after) if after.isdecimal() else None
        )
    if status != http.client.OK:
        raise InvalidAdapterError(
            f"{shown(url)} cannot be fetched: it answers {status} {response.reason}", param="path"
        )


def _connection(parts: urllib.parse.SplitResult, policy: SourcePolicy) -> _PlainConnection:
    kind = _TlsConnection if parts.scheme == "https" else _PlainConnection
    return kind(parts.hostname or "", parts.port or kind.default_port, policy)


def _response(
    connection: _PlainConnection, parts: urllib.parse.SplitResult, headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    target = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = f"?{parts.query}" if parts.query else ""
    common = {"User-Agent": f"loraplex/{__version__}", "Accept-Encoding": "identity"}
    connection.request("GET", target + query, headers={**common, **headers})
    return connection.getresponse()


def _next_url(url: str, location: str) -> str:
    """Where a redirect leads. Raises InvalidAdapterError or PermissionDeniedError."""
    try:
        there = urllib.parse.urljoin(url, location)
        parts = urllib.parse.urlsplit(there)
        is_whole = bool(location and parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not is_whole or parts.scheme not in ("http", "https"):
        bare = location.partition("?")[0]  # behind it may be a signature
        raise InvalidAdapterError(f"{shown(url)} leads to no address: {bare!r}", param="path")
    if url.startswith("https:") and parts.scheme == "http":
        raise PermissionDeniedError(
            f"{shown(url)} leads from https to http, which is not followed", param="path"
        )
    return there


def _condition(tag: str) -> dict[str, str]:
    if tag.startswith(_HTTP_DATE):
        return {"If-Modified-Since": tag.removeprefix(_HTTP_DATE)}
    return {"If-None-Match": tag} if tag else {}


def _tag(response: http.client.HTTPResponse) -> str:
    etag = response.getheader("ETag", "")
    date = response.getheader("Last-Modified", "")
    return etag or (f"{_HTTP_DATE}{date}" if date else "")
