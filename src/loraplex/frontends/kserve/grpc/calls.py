"""Wrapper of every RPC: its id and trace, authentication, end, and records of it."""

import asyncio
import functools
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf.message import DecodeError

from loraplex.core.errors import InvalidRequestError, LoraplexError
from loraplex.core.principal import Principal
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.grpc.access import Authentication
from loraplex.frontends.telemetry.request_ids import HEADER
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import as_current

RETRY_AFTER = "retry-after"
"""Trailing metadata: seconds, as HTTP's header of the name has them."""
MAX_DETAILS = 4000
"""Bytes of a status's text on the wire. Clients drop a status with more than 8 KiB of metadata,
some at random up to 16 KiB, and see RESOURCE_EXHAUSTED in its place."""
_GAP = " ... "
_OK, _CANCELLED = "OK", "CANCELLED"

Context = Any
"""grpc.aio.ServicerContext, whose methods are not typed."""


class Call(msgspec.Struct, frozen=True):
    """One in-flight RPC, as its behaviour sees it."""

    context: Context
    metadata: Mapping[str, str]
    """Texts by lower-case name; values of binary keys are left out."""
    principal: Principal

    async def write(self, message: Any) -> None:
        """Write one response of a stream; return when its client can take more.

        gRPC takes one at a time. Raises CancelledError if the client has gone: the writer may see
        that before the call is cancelled.
        """
        try:
            await self.context.write(message)
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None


class Malformed(msgspec.Struct, frozen=True):
    """Stands for a message that is no protobuf of its class.

    gRPC ends a call itself whose deserialiser raises, without a record of it.
    """

    reason: str

    def error(self) -> InvalidRequestError:
        return InvalidRequestError(f"the request is not a valid message: {self.reason}")


Behavior = Callable[[Any, Call], Awaitable[Any]]
"""Function from a message, or an async iterator of them, to the response; None if it wrote them.

It may raise anything: the call ends with the error's status. A Malformed it meets in an iterator
only.
"""


class Rpc(msgspec.Struct, frozen=True, kw_only=True):
    """What a server does for one method of a service."""

    name: str
    """Full name: /SERVICE/METHOD."""
    behavior: Behavior
    request: Any
    """The class of its messages."""
    response: Any
    streams_requests: bool = False
    streams_responses: bool = False


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All RPCs of a server. Handlers are made once, not for each call, as an interceptor's are."""

    def __init__(self, telemetry: Telemetry, authentication: Authentication) -> None:
        self._telemetry = telemetry
        self._authentication = authentication
        self._handlers: dict[str, Any] = {}

    def add(self, rpc: Rpc) -> None:
        ways = ("stream" if rpc.streams_requests else "unary") + (
            "_stream" if rpc.streams_responses else "_unary"
        )
        self._handlers[rpc.name] = getattr(grpc, f"{ways}_rpc_method_handler")(
            self._around(rpc.name, rpc.behavior),
            _reader(rpc.request),
            rpc.response.SerializeToString,
        )

    def service(self, handler_call_details: Any) -> Any:
        """None for an RPC that is not there."""
        return self._handlers.get(handler_call_details.method)

    def _around(self, name: str, behavior: Behavior) -> Callable[[Any, Context], Awaitable[Any]]:
        begin, principal_of = self._telemetry.begin, self._authentication.of(name)

        async def serve(message: Any, context: Context) -> Any:
            metadata = _metadata(context)
            request = begin("grpc", "", name, _address(context.peer()), metadata, route=name)
            # It is sent at the end of the call.
            context.set_trailing_metadata(((HEADER, request.request_id),))
            status = _CANCELLED
            with as_current(request):
                try:
                    call = Call(context, metadata, principal_of(metadata))
                    if type(message) is Malformed:
                        raise message.error()
                    response = await behavior(message, call)
                    status = _OK
                    return response
                except Exception as raised:
                    error = as_loraplex_error(raised)
                    status = status_of(error).grpc
                    _set_retry_after(context, error)
                    await context.abort(grpc.StatusCode[status], _details(message_of(error)))
                finally:
                    request.end(status)

        return serve


def _reader(message_class: Any) -> Callable[[bytes], Any]:
    parse = message_class.FromString

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Malformed(str(error))

    return read


def _details(text: str) -> str:
    """The text, or its head and its tail if it is longer than MAX_DETAILS: what a client sent may
    be quoted in it, and half of a surrogate pair cannot be sent at all."""
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_DETAILS and sum(map(_wire_size, text)) <= MAX_DETAILS:
        return text
    half = (MAX_DETAILS - len(_GAP)) // 2
    head, tail = _fitting(text[:half], half), _fitting(text[: -half - 1 : -1], half)
    return f"{head}{_GAP}{tail[::-1]}"


def _fitting(text: str, max_bytes: int) -> str:
    """The longest prefix of at most max_bytes."""
    sizes = itertools.accumulate(map(_wire_size, text))
    return text[: sum(size <= max_bytes for size in sizes)]


def _wire_size(character: str) -> int:
    """gRPC percent-encodes each byte of what is not printable ASCII."""
    is_plain = " " <= character <= "~" and character != "%"
    return 1 if is_plain else 3 * len(character.encode())


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _set_retry_after(context: Context, error: LoraplexError) -> None:
    if error.retry_after_seconds is not None:
        seconds = str(max(1, math.ceil(error.retry_after_seconds)))
        context.set_trailing_metadata((*context.trailing_metadata(), (RETRY_AFTER, seconds)))


@functools.lru_cache(maxsize=1024)  # all calls of a connection have one peer
def _address(peer: str) -> str:
    """Address in `ipv4:192.0.2.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")
