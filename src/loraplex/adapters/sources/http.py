"""HTTP and HTTPS downloads by httpx, each connection to an address that the policy has checked.

Where the environment names a proxy (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY), the proxy
resolves the names, and checking the addresses is its job. Names that mean this machine or a private
network are refused all the same.
"""

import contextlib
import logging
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from loraplex.adapters.sources.download import Allowance, Arrived, Missing, write_stream
from loraplex.adapters.sources.policy import SourcePolicy, matches
from loraplex.adapters.sources.reference import shown
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.environment import proxy_for
from loraplex.core.errors import AdapterLoadError, InvalidAdapterError, PermissionDeniedError
from loraplex.core.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT_SECONDS = 30.0
HEADER_SECONDS = 30.0
"""Time limit for the headers of a response, all together."""
_MAX_REDIRECTS = 5
_NUM_TRIES = 4
_FIRST_WAIT_SECONDS = 0.5
_MAX_WAIT_SECONDS = 10.0
_REDIRECTS = (301, 302, 303, 307, 308)
_LATER = (408, 425, 429, 500, 502, 503, 504)
_ABSENT = (404, 410)
_SHA256 = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?')
_HTTP_DATE = "last-modified "
"""Prefix of a tag that is a date."""
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"User-Agent": f"loraplex/{__version__}", "Accept-Encoding": "identity"}
_NO_REUSE = httpx.Limits(max_keepalive_connections=0)
"""Connections are not reused: the pool would share them by address between host names."""


class TryAgainError(Exception):
    """A failure that may pass in a moment."""

    def __init__(self, reason: str, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class PinnedTransport(httpx.BaseTransport):
    """Transport that connects to checked addresses only, or through the environment's proxy."""

    def __init__(self, policy: SourcePolicy) -> None:
        self._policy = policy
        # The system's certificates; httpx alone would bring its own.
        self._context = ssl.create_default_context()
        self._direct = httpx.HTTPTransport(verify=self._context, trust_env=False, limits=_NO_REUSE)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises PermissionDeniedError, AdapterLoadError, httpx.TransportError."""
        url = request.url
        proxy = proxy_for(url.scheme, url.host)
        if proxy is not None:
            self._policy.check_name(url.host)
            return _handled(self._through(proxy), request)
        addresses = self._policy.addresses(url.host, url.port or _PORTS[url.scheme])
        failure: httpx.TransportError | None = None
        for address in addresses:
            try:
                return _handled(self._direct, _to_address(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure or httpx.ConnectError("it has no address")

    def close(self) -> None:
        self._direct.close()

    def _through(self, proxy: str) -> httpx.HTTPTransport:
        try:
            return httpx.HTTPTransport(
                verify=self._context, trust_env=False, limits=_NO_REUSE, proxy=proxy
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise AdapterLoadError(f"the environment's proxy cannot be used: {error}") from error


class HttpClient:
    """HTTP client that obeys the policy. A redirect may also lead to one of `more_hosts`."""

    def __init__(self, policy: SourcePolicy, more_hosts: tuple[str, ...] = ()) -> None:
        self._policy = policy
        self._more_hosts = more_hosts
        self._client = httpx.Client(
            transport=PinnedTransport(policy),
            headers=_HEADERS,
            timeout=_TIMEOUT_SECONDS,
            follow_redirects=False,
        )

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
        sent = {**(headers or {}), **_condition(known_tag)}

        def once() -> Arrived | Missing:
            with self._opened(url, sent) as (response, linked):
                if response.status_code in _ABSENT:
                    return Missing.ABSENT
                if response.status_code == httpx.codes.NOT_MODIFIED and known_tag:
                    return Missing.UNCHANGED
                return _received(response, linked, url, target, allowance)

        return _tried(once, url, allowance)

    def read(
        self, url: str, allowance: Allowance, headers: Mapping[str, str], max_bytes: int
    ) -> bytes:
        """Return a short document, or nothing if there is none. Raises as download."""

        def once() -> bytes:
            with self._opened(url, headers) as (response, _):
                if response.status_code in _ABSENT:
                    return b""
                _require_ok(response, url)
                body = bytearray()
                allowance.measure_rate()
                for chunk in response.iter_raw():
                    allowance.require_time()
                    allowance.require_rate(len(chunk))
                    body += chunk
                    if len(body) > max_bytes:
                        raise InvalidAdapterError(
                            f"{shown(url)} has more than {readable_bytes(max_bytes)}"
                        )
                return bytes(body)

        return _tried(once, url, allowance)

    @contextlib.contextmanager
    def _opened(
        self, url: str, headers: Mapping[str, str]
    ) -> Iterator[tuple[httpx.Response, str | None]]:
        """Yield the response after redirects, and the SHA-256 if the hub's first one has it."""
        sent = dict(headers)
        linked: str | None = None
        origin = urllib.parse.urlsplit(url)
        for hop in range(_MAX_REDIRECTS + 1):
            parts = urllib.parse.urlsplit(url)
            assert parts.hostname is not None
            if hop == 0 or not matches(parts.hostname, self._more_hosts):
                self._policy.check_host(parts.hostname)
            if (parts.scheme, parts.netloc) != (origin.scheme, origin.netloc):
                sent.pop("Authorization", None)  # the first host alone may see it
            with self._client.stream("GET", url, headers=sent) as response:
                if response.status_code not in _REDIRECTS:
                    yield response, linked
                    return
                if hop == 0:
                    match = _SHA256.fullmatch(response.headers.get("X-Linked-Etag", ""))
                    linked = match[1] if match else None
                url = _next_url(url, response.headers.get("Location", ""))
        raise InvalidAdapterError(
            f"more than {_MAX_REDIRECTS} redirects lead to {shown(url)}, which are not followed"
        )


def _handled(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
    """Return a response whose headers arrived in time.

    httpx limits the time of each read only, which one byte every few seconds keeps.
    """
    connected: list[socket.socket] = []

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            connected.append(info["return_value"].get_extra_info("socket"))

    def end() -> None:
        for connection in connected:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    request.extensions["trace"] = trace
    timer = threading.Timer(HEADER_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        return transport.handle_request(request)
    finally:
        timer.cancel()


def _to_address(request: httpx.Request, address: str) -> httpx.Request:
    """Return the same request to a numeric address: Host header and certificate keep the name."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


def _tried(once: Callable[[], T], url: str, allowance: Allowance) -> T:
    """Call once, and again after a pause while the reason may pass."""
    wait_seconds = _FIRST_WAIT_SECONDS
    for left in reversed(range(_NUM_TRIES)):
        try:
            return once()
        except httpx.InvalidURL as error:
            raise InvalidAdapterError(f"{shown(url)} is not an address: {error}") from error
        except (TryAgainError, OSError, httpx.TransportError) as error:
            refused = _certificate_error(error)
            if refused is not None:
                raise InvalidAdapterError(f"{shown(url)}: {refused.verify_message}") from error
            reason = " ".join(str(error).split()) or type(error).__name__
            if not left:
                raise AdapterLoadError(
                    f"{shown(url)} cannot be fetched now: {reason}; try again later"
                ) from error
            wanted = error.wait_seconds if isinstance(error, TryAgainError) else None
            pause = min(wanted or wait_seconds, _MAX_WAIT_SECONDS)
            logger.info("%s: %s; trying again in %.1f s", shown(url), reason, pause)
            allowance.wait(pause)
            wait_seconds *= 2
    raise AssertionError("unreachable: the last try returns or raises")


def _certificate_error(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """Return the refused certificate that caused an error of httpx."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _received(
    response: httpx.Response,
    linked: str | None,
    url: str,
    target: Path,
    allowance: Allowance,
) -> Arrived:
    _require_ok(response, url)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise InvalidAdapterError(f"{shown(url)} comes as {encoding}, which was not requested")
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None  # a claim, not a fact
    allowance.require_bytes(total or 0)
    sha256, num_bytes = write_stream(response.iter_raw(), target, allowance, total)
    if linked is not None and sha256 != linked:
        raise TryAgainError(f"its SHA-256 is {sha256}, that of the hub {linked}")
    allowance.spend(num_bytes)
    return Arrived(_tag(response), sha256, num_bytes)


def _require_ok(response: httpx.Response, url: str) -> None:
    status = f"{response.status_code} {response.reason_phrase}"
    if response.status_code in _LATER:
        after = response.headers.get("Retry-After", "")
        raise TryAgainError(f"it responds {status}", float(after) if after.isdecimal() else None)
    if response.status_code != httpx.codes.OK:
        raise InvalidAdapterError(
            f"{shown(url)} cannot be fetched: it responds {status}", param="path"
        )


def _next_url(url: str, location: str) -> str:
    """Return where a redirect leads. Raises InvalidAdapterError or PermissionDeniedError."""
    try:
        there = urllib.parse.urljoin(url, location)
        parts = urllib.parse.urlsplit(there)
        is_whole = bool(location and parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not is_whole or parts.scheme not in ("http", "https"):
        bare = location.partition("?")[0]  # the query may be a signature
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


def _tag(response: httpx.Response) -> str:
    date = response.headers.get("Last-Modified")
    return str(response.headers.get("ETag") or (f"{_HTTP_DATE}{date}" if date else ""))
