"""Limits of HTTP connections, and the responses for connections that exceed them."""

import http
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

_VERSIONS = ("1.0", "1.1")
_INVALID = "invalid_request"

Headers = Sequence[tuple[bytes, bytes]]
"""Headers of a request; names are in lower case."""


class Refusal(NamedTuple):
    """Error that ends a connection before an application has handled the request."""

    status: int
    code: str
    message: str

    def response(self) -> bytes:
        """Return the whole HTTP response."""
        is_client_error = self.status != 503
        error = {
            "message": self.message,
            "type": "invalid_request_error" if is_client_error else "service_unavailable_error",
            "param": None,
            "code": self.code,
        }
        body = msgspec.json.encode({"error": error})
        retry = "" if is_client_error else "retry-after: 1\r\n"
        head = (
            f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
            "connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body


class ConnectionLimits(NamedTuple):
    """Limits of the connections of one port."""

    max_connections: int
    max_headers: int
    max_header_bytes: int
    max_request_line_bytes: int
    header_timeout_seconds: float
    body_timeout_seconds: float

    def line_too_long(self) -> Refusal:
        limit = self.max_request_line_bytes
        return Refusal(414, "request_line_too_long", f"the request line is over {limit} bytes")

    def headers_too_large(self) -> Refusal:
        limit = self.max_header_bytes
        return Refusal(431, "headers_too_large", f"request line and headers are over {limit} bytes")

    def too_many_headers(self) -> Refusal:
        return Refusal(431, "too_many_headers", f"there are over {self.max_headers} headers")

    def too_many_connections(self) -> Refusal:
        limit = self.max_connections
        return Refusal(503, "too_many_connections", f"{limit} connections are open")

    def headers_are_late(self) -> Refusal:
        seconds = self.header_timeout_seconds
        message = f"the headers did not come within {seconds:g} seconds"
        return Refusal(408, "header_timeout", message)


def not_http(error: Exception) -> Refusal:
    return Refusal(400, _INVALID, f"this is not HTTP: {error}")


def refusal_of_head(
    method: bytes, url: bytes, version: str, headers: Headers, limits: ConnectionLimits
) -> Refusal | None:
    """Check a request head that the parser has accepted; return what is wrong with it.

    This covers the limits, and heads that another HTTP parser, such as that of a proxy in front of
    this server, could read as a different request (RFC 9112, 3.2 and 6.1).
    """
    line_bytes = len(method) + len(url) + len("  HTTP/1.1")
    if line_bytes > limits.max_request_line_bytes:
        return limits.line_too_long()
    if len(headers) > limits.max_headers:
        return limits.too_many_headers()
    num_bytes = sum(map(len, itertools.chain.from_iterable(headers)))
    if line_bytes + num_bytes + 4 * len(headers) > limits.max_header_bytes:
        return limits.headers_too_large()
    if version not in _VERSIONS:
        return Refusal(505, _INVALID, f"HTTP/{version} is not supported")
    names = [name for name, _ in headers]
    num_hosts = names.count(b"host")
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return Refusal(400, _INVALID, f"there are {num_hosts} host headers instead of one")
    if method == b"CONNECT":
        return Refusal(400, _INVALID, "CONNECT is for proxies")
    codings = {v.lower() for name, v in headers if name == b"transfer-encoding"}
    if codings - {b"chunked"}:
        return Refusal(501, _INVALID, "the only supported transfer-encoding is chunked")
    return None
