"""What an HTTP connection takes, and the words for whom it takes no more from."""

import http
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

_VERSIONS = ("1.0", "1.1")
_INVALID = "invalid_request"


class ConnectionLimits(NamedTuple):
    max_connections: int
    max_headers: int
    max_header_bytes: int
    max_request_line_bytes: int
    header_timeout_seconds: float
    body_timeout_seconds: float

    def line_too_long(self) -> "Refusal":
        most = self.max_request_line_bytes
        return Refusal(414, "request_line_too_long", f"the request line is over {most} bytes")

    def headers_too_large(self) -> "Refusal":
        most = self.max_header_bytes
        return Refusal(431, "headers_too_large", f"request line and headers are over {most} bytes")

    def too_many_headers(self) -> "Refusal":
        return Refusal(431, "too_many_headers", f"there are over {self.max_headers} headers")

    def too_many_connections(self) -> "Refusal":
        most = self.max_connections
        return Refusal(503, "too_many_connections", f"{most} connections are open")

    def headers_are_late(self) -> "Refusal":
        seconds = self.header_timeout_seconds
        message = f"the headers did not come within {seconds:g} seconds"
        return Refusal(408, "header_timeout", message)


class Refusal(NamedTuple):
    status: int
    code: str
    message: str

    def answer(self) -> bytes:
        """The whole response; the connection ends with it."""
        is_theirs = self.status != 503
        error = {
            "message": self.message,
            "type": "invalid_request_error" if is_theirs else "service_unavailable_error",
            "param": None,
            "code": self.code,
        }
        body = msgspec.json.encode({"error": error})
        retry = "retry-after: 1\r\n" if self.status == 503 else ""
        head = (
            f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
            "connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body


class Refused(Exception):
    """Raised where a parser calls us, to stop it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


Headers = Sequence[tuple[bytes, bytes]]
"""Of a request; names in lower case."""


def not_http(error: Exception) -> Refusal:
    return Refusal(400, _INVALID, f"this is not HTTP: {error}")


def not_a_target() -> Refusal:
    return Refusal(400, _INVALID, "the request's target is no URL")


def body_of(
    method: bytes, target: bytes, version: str, headers: Headers, limits: ConnectionLimits
) -> tuple[int, bool]:
    """What a head that the parser took says of the body: its bytes, 0 where there is none and where
    it comes in chunks; and whether it is held back until its client is told to go on.

    Raises Refused for what is over the limits, and for what the parser lets pass though it could
    mean another request to who stands between the client and us.
    """
    _check_sizes(len(method) + len(target) + len(" HTTP/1.1") + 1, headers, limits)
    if version not in _VERSIONS:
        raise Refused(Refusal(505, _INVALID, f"HTTP/{version} is not spoken here"))
    names = [name for name, _ in headers]
    num_hosts = names.count(b"host")
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        raise Refused(Refusal(400, _INVALID, f"there are {num_hosts} host headers instead of one"))
    if method == b"CONNECT":
        raise Refused(Refusal(400, _INVALID, "CONNECT is for proxies"))
    if b"transfer-encoding" in names and any(
        coding.lower() != b"chunked" for coding in _values(headers, b"transfer-encoding")
    ):
        raise Refused(Refusal(501, _INVALID, "the one transfer-encoding known here is chunked"))
    has_length = b"content-length" in names
    is_held_back = (
        b"expect" in names
        and version != "1.0"
        and any(each.lower() == b"100-continue" for each in _values(headers, b"expect"))
    )
    num_bytes = int(headers[names.index(b"content-length")][1]) if has_length else 0
    return num_bytes, is_held_back


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for each, value in headers if each == name]


def _check_sizes(line: int, headers: Headers, limits: ConnectionLimits) -> None:
    """line: the first one's length."""
    if line > limits.max_request_line_bytes:
        raise Refused(limits.line_too_long())
    if len(headers) > limits.max_headers:
        raise Refused(limits.too_many_headers())
    num_bytes = sum(map(len, itertools.chain.from_iterable(headers)))
    if line + num_bytes + 4 * len(headers) > limits.max_header_bytes:
        raise Refused(limits.headers_too_large())
