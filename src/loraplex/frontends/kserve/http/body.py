"""Bodies: their length, content encodings, and JSON in and out."""

import gzip
import zlib
from typing import Any

import msgspec
from starlette.responses import Response

from loraplex.core.errors import InvalidRequestError, PayloadTooLargeError

DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024
ENCODINGS = ("gzip", "deflate")
_MAX_LENGTH_DIGITS = 19
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


def length_of(header: str) -> int | None:
    """A number of bytes; None if it is none, or absurd."""
    is_number = header.isascii() and header.isdigit() and len(header) < _MAX_LENGTH_DIGITS
    return int(header) if is_number else None


def too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body is larger than the limit of {max_bytes} bytes")


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body without its Content-Encoding; the limit holds for what comes out, too."""
    if not encoding:
        return body
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ENCODINGS:
        raise InvalidRequestError(
            f"Unsupported content-encoding '{encoding}'; use gzip, deflate or identity"
        )
    unpacker = zlib.decompressobj(_GZIP_WINDOW if encoding == "gzip" else zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(body, max_bytes)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not valid {encoding} data: {error}") from None
    if unpacker.unconsumed_tail:
        raise too_large(max_bytes)
    if not unpacker.eof:
        raise InvalidRequestError(f"the body is not valid {encoding} data: it ends early")
    return data


def compress(body: bytes, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
    """(body, headers) in the first encoding that the client accepts and we have."""
    for part in accept_encoding.split(",") if accept_encoding else ():
        name, _, quality = part.strip().lower().partition(";")
        if quality.replace(" ", "") in ("q=0", "q=0.0"):
            continue
        if name == "gzip":
            return gzip.compress(body, compresslevel=1), {"Content-Encoding": "gzip"}
        if name == "deflate":
            return zlib.compress(body, level=1), {"Content-Encoding": "deflate"}
    return body, {}


def parse_object(body: bytes, *, what: str = "the request body") -> dict[str, Any]:
    """A JSON object; nothing at all is the empty object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body.strip():
            return {}
        raise InvalidRequestError(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
