"""Messages between the ingress of a Ray Serve application and its replicas."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from loraplex.serving.continuation import RecordPart, Unrecorded


class HttpCall(msgspec.Struct, frozen=True):
    """One HTTP request with its whole body, and the record of the replica that had it before."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: str = ""
    former: tuple[bytes, ...] = ()
    """Encoded parts of the record."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Status line and headers of a response."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Body(msgspec.Struct, frozen=True, tag=True):
    """A piece of a response's body."""

    data: bytes


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """A part of the record, encoded for the ingress, which only keeps it.

    It comes before the part of the response that follows from it.
    """

    part: bytes
    problem: str = ""
    """Why the request cannot be continued; empty: it can."""

    @classmethod
    def of(cls, part: RecordPart) -> "Recorded":
        problem = part.reason if isinstance(part, Unrecorded) else ""
        return cls(msgspec.msgpack.encode(part), problem)


Message = Start | Body | Recorded

_MESSAGES: Final = msgspec.msgpack.Decoder(list[Message])
_PARTS: Final = msgspec.msgpack.Decoder(RecordPart)
encode: Final = msgspec.msgpack.Encoder().encode


def called_path(scope: Mapping[str, Any]) -> str:
    """Return the path of an ASGI request without the route prefix of its application."""
    prefix = scope.get("root_path", "").rstrip("/")
    path = str(scope["path"])
    is_below = path == prefix or path.startswith(f"{prefix}/")
    return (path.removeprefix(prefix) if is_below else path) or "/"


def decode_messages(data: bytes) -> list[Message]:
    return _MESSAGES.decode(data)


def decode_call(data: bytes) -> HttpCall:
    return msgspec.msgpack.decode(data, type=HttpCall)


def decode_record(parts: Sequence[bytes]) -> list[RecordPart]:
    return [_PARTS.decode(part) for part in parts]
