"""Wrapper of every RPC: its id and trace, authentication, end, and records of it.

gRPC reads a unary call's message before it calls the handler. A call that streams requests gets
none before it reads: so calls without a key, and those that need none, are served as such, and the
memory for their messages is never taken. Without a valid key no RPC begins, except health checks.
"""

import asyncio
import contextlib
import functools
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.principal import Principal
from loraplex.frontends.access import Authenticate, without_key
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.grpc.wire import MessageReader
from loraplex.frontends.long_json import SENT_BYTES
from loraplex.frontends.telemetry.telemetry import REQUEST_ID_HEADER, Telemetry
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.wire_request import WireRequest, as_current

_SERVICE = "/inference.GRPCInferenceService"
OPEN_RPCS = frozenset(
    {
        f"{_SERVICE}/ServerLive",
        f"{_SERVICE}/ServerReady",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }
)
"""RPCs of load balancers. They ignore their messages, so these are not read: see `Calls`."""


RETRY_AFTER = "retry-after"
"""Trailing metadata: seconds, as HTTP's header of the name has them."""
MAX_DETAILS = 4000
"""Bytes of a status's text on the wire. Clients drop a status with more than 8 KiB of metadata,
some at random up to 16 KiB, and see RESOURCE_EXHAUSTED in its place."""
_GAP = " ... "
_OK, _CANCELLED = "OK", "CANCELLED"

Context = Any
"""grpc.aio.ServicerContext, whose methods are not typed."""


class RpcCall(msgspec.Struct, frozen=True):
    """One in-flight RPC, as its behaviour sees it."""

    context: Context
    metadata: Mapping[str, str]
    """Texts by lower-case name; values of binary keys are left out."""
    principal: Principal
    messages: BodyMemory
    """Memory of the messages of all calls: a behaviour counts those of a stream."""
    task: "asyncio.Task[Any]"
    """Task of the whole call."""
    unread_seconds: float
    """How long a client may take to read each SENT_BYTES of a response of a stream."""
    responses: ResponseMemory = msgspec.field(default_factory=ResponseMemory)
    """Memory of responses: a behaviour counts the long one of a unary call."""

    async def write(self, message: Any) -> None:
        """Write one response of a stream; return when its client can take more.

        gRPC takes one at a time. Raises CancelledError if the client has gone: the writer may see
        that before the call is cancelled. The call of a client that does not read is cancelled,
        too: gRPC keeps the one response that waits until the client ends the call or the
        connection, and has no way to take it back.
        """
        num_parts = 1 + message.ByteSize() // SENT_BYTES
        try:
            async with asyncio.timeout(num_parts * self.unread_seconds):
                await self.context.write(message)
        except TimeoutError:
            self.task.cancel()
            raise asyncio.CancelledError from None
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None


Behavior = Callable[[Any, RpcCall], Awaitable[Any]]
"""Function from a message, or an async iterator of them, to the response; None if it wrote them.

It may raise anything: the call ends with the error's status.
"""
_PrincipalOf = Callable[[Mapping[str, str]], Principal]


class Rpc(msgspec.Struct, frozen=True, kw_only=True):
    """What a server does for one method of a service."""

    name: str
    """Full name: /SERVICE/METHOD."""
    behavior: Behavior
    response: Any
    """The class of its responses."""
    reader: MessageReader | None = None
    """Reader of its message; None: the behaviour gets the bytes, of each message of a stream."""
    streams_requests: bool = False
    streams_responses: bool = False


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All RPCs of a server. Handlers are made once, not for each call, as an interceptor's are."""

    def __init__(
        self,
        telemetry: Telemetry,
        authenticate: Authenticate,
        messages: BodyMemory,
        unread_seconds: float,
        responses: ResponseMemory | None = None,
        *,
        health_is_open: bool = True,
    ) -> None:
        """messages: memory of the messages, from when gRPC has read them. unread_seconds: how long
        a client may take to read each SENT_BYTES of a response of a stream. responses: their
        memory; None: without a limit."""
        self._responses = responses or ResponseMemory()
        self._unread_seconds = unread_seconds
        self._telemetry = telemetry
        self._messages = messages
        self._authenticate = authenticate
        self._open = OPEN_RPCS if health_is_open else frozenset()
        self._rpcs: dict[str, Rpc] = {}
        self._handlers: dict[str, Any] = {}

    def add(self, rpc: Rpc) -> None:
        is_open = rpc.name in self._open
        if is_open:
            rpc = msgspec.structs.replace(rpc, reader=None)
        serve = self._around(rpc, without_key if is_open else self._authenticate)
        self._rpcs[rpc.name] = rpc
        self._handlers[rpc.name] = _handler(rpc, serve, is_read=not is_open)

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call, whose message is not read yet; None: no such RPC."""
        name = handler_call_details.method
        rpc = self._rpcs.get(name)
        if rpc is None:
            return None
        try:
            if name not in self._open:
                self._authenticate(_texts(handler_call_details.invocation_metadata))
        except LoraplexError as error:
            return _handler(rpc, self._around(rpc, _refusing(error)), is_read=False)
        return self._handlers[name]

    def _around(self, rpc: Rpc, principal_of: _PrincipalOf) -> Callable[..., Awaitable[Any]]:
        begin, name, behavior, reader = self._telemetry.begin, rpc.name, rpc.behavior, rpc.reader
        messages, unread_seconds = self._messages, self._unread_seconds
        responses = self._responses

        async def serve(message: Any, context: Context) -> Any:
            metadata = _texts(context.invocation_metadata() or ())
            request = begin("grpc", "", name, _address(context.peer()), metadata, route=name)
            # It is sent at the end of the call.
            context.set_trailing_metadata(((REQUEST_ID_HEADER, request.request_id),))
            status, is_being_sent = _CANCELLED, False
            with as_current(request), contextlib.ExitStack() as stack:
                try:
                    task = asyncio.current_task()
                    assert task is not None
                    principal = principal_of(metadata)
                    request.tenant = principal.tenant
                    parts = (messages, task, unread_seconds, responses)
                    call = RpcCall(context, metadata, principal, *parts)
                    if isinstance(message, bytes):
                        stack.enter_context(messages.lease()).take(len(message))
                    if reader is not None:
                        message = (await reader.read(message)).message
                    response = await behavior(message, call)
                    status = _OK
                    if request.num_response_bytes and not rpc.streams_responses:
                        # It takes memory until its client has read it.
                        context.add_done_callback(lambda _: _end(request))
                        is_being_sent = True
                    return response
                except Exception as raised:
                    error = as_loraplex_error(raised)
                    status = status_of(error).grpc
                    _set_retry_after(context, error)
                    await context.abort(grpc.StatusCode[status], _details(message_of(error)))
                finally:
                    if not is_being_sent:
                        request.end(status)

        return serve


def _handler(rpc: Rpc, serve: Callable[..., Awaitable[Any]], *, is_read: bool) -> Any:
    """Return gRPC's handler.

    is_read: gRPC reads the message of a unary call, and then calls `serve`. Otherwise the message
    stays with the client: it takes no memory here.
    """
    requests = "unary" if is_read and not rpc.streams_requests else "stream"
    responses = "stream" if rpc.streams_responses else "unary"
    make = getattr(grpc, f"{requests}_{responses}_rpc_method_handler")
    return make(serve, None, rpc.response.SerializeToString)


def _end(request: WireRequest) -> None:
    """End a request whose response has been sent, or whose client has gone."""
    with as_current(request):
        request.end(_OK)


def _refusing(error: LoraplexError) -> _PrincipalOf:
    def refuse(metadata: Mapping[str, str]) -> Principal:
        del metadata
        raise error

    return refuse


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


def _texts(pairs: Iterable[tuple[str, object]]) -> dict[str, str]:
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
