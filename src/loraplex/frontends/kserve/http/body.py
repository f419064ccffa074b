"""Bodies: their length, content encodings, and JSON in and out."""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.core.errors import InvalidRequestError, PayloadTooLargeError
from loraplex.core.principal import Principal
from loraplex.frontends.long_json import send_pieces
from loraplex.frontends.streams import ClientDisconnectedError

DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024
ENCODINGS = ("gzip", "deflate")
_IDENTITY = "identity"
LENGTH = re.compile("[0-9]{1,18}")
"""A number of bytes that is not absurd, in a header."""
_CHUNK_BYTES = 64 * 1024
_MAX_GZIP_MEMBERS = 10_000
"""Members of one body: the shortest has 20 empty bytes, so a limit of bytes is not enough."""
Bytes = bytes | bytearray
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


def too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body is larger than the limit of {max_bytes} bytes")


def decompress(body: Bytes, encoding: str, max_bytes: int) -> Bytes:
    """The body without its Content-Encoding; the limit holds for what comes out, too.

    gzip data may have several members, one after the other (RFC 1952).
    """
    if not encoding:
        return body
    encoding = encoding.strip().lower()
    if encoding in ("", _IDENTITY):
        return body
    if encoding not in ENCODINGS:
        raise InvalidRequestError(
            f"Unsupported content-encoding '{encoding}'; use gzip, deflate or identity"
        )
    is_gzip = encoding == "gzip"
    data, rest = bytearray(), memoryview(body)
    try:
        for _ in range(_MAX_GZIP_MEMBERS if is_gzip else 1):
            unpacker = zlib.decompressobj(_GZIP_WINDOW if is_gzip else zlib.MAX_WBITS)
            rest = rest[_unpack(unpacker, rest, data, max_bytes) :]
            if not rest:
                return data
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not valid {encoding} data: {error}") from None
    raise InvalidRequestError(
        f"the body is not valid {encoding} data: {len(rest)} bytes follow its end"
    )


def _unpack(unpacker: Any, packed: memoryview, data: bytearray, max_bytes: int) -> int:
    """Append to data what is packed first; returns how long that was.

    It goes by chunks because zlib copies what follows the end. Raises zlib.error.
    """
    position = 0
    while not unpacker.eof:
        chunk = packed[position : position + _CHUNK_BYTES]
        if not chunk:
            raise zlib.error("it ends early")
        data += unpacker.decompress(chunk, max_bytes - len(data) + 1)
        if len(data) > max_bytes:
            raise too_large(max_bytes)
        position += len(chunk) - len(unpacker.unused_data)
    return position


def compress(
    pieces: Sequence[bytes | memoryview], accept_encoding: str
) -> tuple[Sequence[bytes | memoryview], dict[str, str]]:
    """(pieces of the body, headers) in the encoding that the client likes best of those we have."""
    match _preferred(accept_encoding) if accept_encoding else _IDENTITY:
        case "gzip":
            packer = zlib.compressobj(1, wbits=_GZIP_WINDOW)
        case "deflate":
            packer = zlib.compressobj(1)
        case _:
            return pieces, {}
    encoding = _preferred(accept_encoding)
    packed = [packer.compress(piece) for piece in pieces]
    return [*filter(None, packed), packer.flush()], {"Content-Encoding": encoding}


def _preferred(accept_encoding: str) -> str:
    """Encoding of the highest quality, of equals the first; identity if none is accepted."""
    qualities: dict[str, float] = {}
    for part in accept_encoding.lower().split(","):
        name, _, parameters = part.partition(";")
        qualities.setdefault(name.strip(), _quality(parameters))
    of_others = qualities.pop("*", 0.0)
    for name in (_IDENTITY, *ENCODINGS):
        qualities.setdefault(name, of_others)
    ours = [name for name in qualities if name == _IDENTITY or name in ENCODINGS]
    best = max(ours, key=qualities.__getitem__)
    return best if qualities[best] else _IDENTITY


def _quality(parameters: str) -> float:
    """1 if nothing is said; 0 for what is no quality: such an encoding is not used."""
    name, _, number = parameters.partition("=")
    if not parameters.strip():
        return 1.0
    try:
        quality = float(number) if name.strip() == "q" else 0.0
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0


def parse_object(body: Bytes, *, what: str = "the request body") -> dict[str, Any]:
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


class HttpRequest(msgspec.Struct, frozen=True):
    """headers: by lower-case name. The last four: what the path names."""

    headers: Mapping[str, str]
    receive: Receive
    principal: Principal
    model: str = ""
    version: str = ""
    region: str = ""
    repository: str = ""

    async def body(self, max_bytes: int) -> bytearray:
        """All of it, as it came.

        Raises PayloadTooLargeError as soon as that is known, and ClientDisconnectedError.
        """
        declared = self.headers.get("content-length", "")
        if LENGTH.fullmatch(declared) and int(declared) > max_bytes:
            raise too_large(max_bytes)
        body = bytearray()  # it grows in place: joining chunks would copy all of them at once
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            if not message.get("more_body", False):
                return body


class WholeResponse:
    """An ASGI response, with status 200. Starlette's takes three times as long to make."""

    __slots__ = ("_headers", "_pieces")

    def __init__(
        self,
        pieces: Sequence[bytes | memoryview],
        media_type: bytes,
        headers: Mapping[str, str],
    ) -> None:
        """pieces: of the body."""
        self._pieces = pieces
        self._headers = [
            (b"content-type", media_type),
            (b"content-length", b"%d" % sum(map(len, pieces))),
            *[(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send_pieces(self._pieces, send)
