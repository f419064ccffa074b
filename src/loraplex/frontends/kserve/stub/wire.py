"""Messages of the request socket, and how they are framed on a unix stream socket.

A frame is the length of a message in bytes, 32 bits little-endian, and the message: a msgpack map
whose `type` names it. The server speaks first, with `Welcome`. Then the client sends `Infer`,
`Cancel` and `Ping` in any order. Each Infer gets any number of `Response`s and one end: a Response
with is_final, or a `RequestFailure`. Each Ping gets a `Status`.
"""

import struct

import msgspec

PROTOCOL = 1
"""Changes with every change that the other side would not understand."""
LENGTH = struct.Struct("<I")

PING_SECONDS = 2.0
"""A client sends a Ping so often."""
SILENCE_SECONDS = 30.0
"""Who has heard nothing for so long takes the other side for dead."""
CANCELLED = "CANCELLED"

Parameter = bool | int | float | str


class WireTensor(msgspec.Struct, frozen=True, array_like=True):
    """`data` is the protocol's binary form: little-endian, BYTES with 32-bit length prefixes."""

    name: str
    datatype: str
    """Name in the protocol: FP16, BYTES."""
    shape: tuple[int, ...]
    data: bytes


class Infer(msgspec.Struct, frozen=True, kw_only=True, tag="infer"):
    """A request. Its id is the connection's own: not in use at the moment."""

    id: int
    model: str
    request_id: str = ""
    """The client's of Triton: may be empty, may repeat."""
    inputs: tuple[WireTensor, ...] = ()
    requested: tuple[str, ...] = ()
    """Names of outputs; empty is all."""
    parameters: dict[str, Parameter] = {}
    is_unary: bool = False
    """The model gives exactly one response."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The responses to a request are no longer needed. It may have ended already."""

    id: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """I am there; how are you?"""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    protocol: int
    max_message_bytes: int
    """Limit of a message from the client; a larger one ends the connection."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    is_ready: bool
    reason: str = ""
    """Why it is not ready."""
    models: tuple[str, ...] = ()
    """That are served."""


class Response(msgspec.Struct, frozen=True, kw_only=True, tag="response"):
    id: int
    outputs: tuple[WireTensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    is_final: bool = True


class RequestFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """The end of a request, or of a connection if its id is None."""

    id: int | None = None
    kind: str
    """The name of a gRPC status: INVALID_ARGUMENT."""
    message: str
    outputs: tuple[WireTensor, ...] = ()
    """Some failures have outputs even so."""


FromClient = Infer | Cancel | Ping
FromServer = Welcome | Status | Response | RequestFailure


class NotAMessage(Exception):
    """Received bytes cannot be read; the message has the reason."""


_encoder = msgspec.msgpack.Encoder()
_from_client: "msgspec.msgpack.Decoder[FromClient]" = msgspec.msgpack.Decoder(FromClient)
_from_server: "msgspec.msgpack.Decoder[FromServer]" = msgspec.msgpack.Decoder(FromServer)


def frame(message: FromClient | FromServer) -> bytes:
    """Raises ValueError for a message of 4 GiB or more."""
    payload = _encoder.encode(message)
    if len(payload) > 0xFFFFFFFF:
        raise ValueError(f"a message of {len(payload)} bytes does not fit a frame")
    return LENGTH.pack(len(payload)) + payload


def read_from_client(payload: bytes) -> FromClient:
    """Raises NotAMessage."""
    try:
        return _from_client.decode(payload)
    except ValueError as error:  # msgspec's own, or text that is no UTF-8
        raise NotAMessage(str(error)) from error


def read_from_server(payload: bytes) -> FromServer:
    """Raises NotAMessage."""
    try:
        return _from_server.decode(payload)
    except ValueError as error:
        raise NotAMessage(str(error)) from error
