"""What is around every RPC: its record, its key, its errors."""

import asyncio
import contextlib
import string
import types
from urllib.parse import quote

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from loraplex.core.errors import ModelNotFoundError, UnauthenticatedError
from loraplex.core.principal import LOCAL, Principal
from loraplex.frontends.access import everyone_is_local
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.grpc.calls import (
    MAX_DETAILS,
    OPEN_RPCS,
    Calls,
    Rpc,
    RpcCall,
)
from loraplex.frontends.kserve.grpc.servicer import SERVICE, TritonServicer
from loraplex.frontends.kserve.grpc.wire import MessageReader
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.long_json import SENT_BYTES
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import WireRequest, current_request
from support.echo_service import EchoService

FIRST = pb.ServerLiveResponse(live=True)
PLAIN = (string.punctuation + " ").replace("%", "")
"""Characters that gRPC sends unescaped, in addition to letters and digits."""


class Context:
    """Percent-encode text as gRPC hands it to a handler."""

    def __init__(self, *metadata: tuple[str, object], peer: str = "ipv4:192.0.2.1:5000") -> None:
        self._metadata = metadata
        self._peer = peer
        self.trailing: dict[str, str] = {}
        self.status = ""
        self.written: list[object] = []
        self.is_gone = False

    def invocation_metadata(self):
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def set_trailing_metadata(self, pairs) -> None:
        self.trailing = dict(pairs)

    async def write(self, message) -> None:
        if self.is_gone:
            raise grpc.aio.BaseError("the client has gone")
        self.written.append(message)

    async def abort(self, code, details) -> None:
        self.status = f"{code.name}: {details}"
        raise grpc.aio.AbortError


@pytest.fixture
def reported() -> list[WireRequest]:
    return []


@pytest.fixture
def handler(reported):
    """A function (behavior, **fields of the RPC) -> what gRPC would call."""

    def make(
        behavior,
        authenticate=everyone_is_local,
        unread_seconds=60.0,
        *,
        health_is_open=True,
        **fields,
    ):
        calls = Calls(
            *(Telemetry([reported.append]), authenticate, BodyMemory(), unread_seconds),
            health_is_open=health_is_open,
        )
        rpc = Rpc(**{"name": "/s/M", "behavior": behavior} | fields, response=pb.ServerLiveResponse)
        calls.add(rpc)
        found = calls.service(types.SimpleNamespace(method=rpc.name, invocation_metadata=()))
        assert found.request_deserializer is None
        ways = (found.unary_unary, found.unary_stream, found.stream_unary, found.stream_stream)
        [way] = filter(None, ways)
        # gRPC reads the message of a unary call before it calls the handler.
        assert found.request_streaming is (way in ways[2:])
        return way

    return make


async def test_a_call_is_reported_and_knows_its_metadata(handler, reported):
    seen: list[RpcCall] = []

    async def behavior(message, call):
        seen.append(call)
        assert current_request().route == "/s/M"
        return message + 1

    context = Context(("x-request-id", "mine"), ("a-bin", b"\0"), peer="ipv6:%5B::1%5D:5000")
    assert await handler(behavior)(1, context) == 2
    assert seen[0].metadata == {"x-request-id": "mine"}
    assert seen[0].principal is LOCAL
    assert context.trailing == {"x-request-id": "mine"}
    [request] = reported
    assert (request.protocol, request.status, request.client) == ("grpc", "OK", "::1")
    assert current_request() is None


async def test_an_error_is_the_status_and_is_reported(handler, reported):
    async def behavior(message, call):
        raise ModelNotFoundError("no such model")

    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await handler(behavior)(1, context)
    assert context.status == "NOT_FOUND: no such model"
    assert (reported[0].status, reported[0].error_code) == ("NOT_FOUND", "model_not_found")


async def test_a_defect_reports_no_details(handler, reported, caplog):
    async def behavior(message, call):
        raise ZeroDivisionError("secret")

    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await handler(behavior)(1, context)
    assert context.status == "INTERNAL: internal error; the server's log has the details"
    assert reported[0].status == "INTERNAL"
    assert "secret" in caplog.text


async def test_a_cancelled_call(handler, reported):
    async def behavior(message, call):
        await asyncio.sleep(60)

    task = asyncio.ensure_future(handler(behavior)(1, Context()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reported[0].status == "CANCELLED"


async def test_a_client_that_has_gone_is_no_defect(handler, reported, caplog):
    async def behavior(message, call):
        await call.write(FIRST)
        context.is_gone = True
        await call.write(pb.ServerLiveResponse())

    context = Context()
    with pytest.raises(asyncio.CancelledError):
        await handler(behavior, streams_responses=True)(1, context)
    assert context.written == [FIRST]
    assert (reported[0].status, context.status) == ("CANCELLED", "")
    assert not caplog.records


async def test_a_call_whose_client_does_not_read_is_cancelled(handler, reported, caplog):
    async def behavior(message, call):
        async with asyncio.TaskGroup() as tasks:  # as those of a stream's requests
            tasks.create_task(call.write(FIRST))
            tasks.create_task(asyncio.Event().wait())

    context = Context()
    context.write = lambda message: asyncio.Event().wait()
    serve = handler(behavior, streams_responses=True, unread_seconds=0.01)
    with pytest.raises(asyncio.CancelledError):
        await serve(1, context)
    assert (reported[0].status, context.status) == ("CANCELLED", "")
    assert not caplog.records


async def test_a_long_response_has_the_time_for_each_256_kibibytes(handler, monkeypatch):
    given: list[float] = []

    def timeout(seconds):
        given.append(seconds)
        return contextlib.nullcontext()

    async def behavior(message, call):
        for size in (0, SENT_BYTES, 4 * SENT_BYTES):
            await call.write(pb.ModelStreamInferResponse(error_message="x" * size))

    monkeypatch.setattr(asyncio, "timeout", timeout)
    await handler(behavior, streams_responses=True, unread_seconds=2.0)(1, Context())
    assert given == [2.0, 4.0, 10.0]


async def test_an_invalid_message_is_reported_like_any_request(handler, reported):
    async def behavior(message, call):
        raise AssertionError("it is not called")

    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await handler(behavior, reader=MessageReader(pb.ModelReadyRequest, 10))(
            b"\x0a\x05", context
        )
    assert context.status == "INVALID_ARGUMENT: the request is not a valid message: it ends early"
    assert (reported[0].status, reported[0].error_code) == ("INVALID_ARGUMENT", "invalid_request")
    assert context.trailing


@pytest.mark.parametrize("character", ["x", "%", "\n", "é", "漢"])
async def test_details_fit_into_the_metadata(handler, character):
    async def behavior(message, call):
        raise ModelNotFoundError(f"begin {f'{character * 150} ' * 100}end")

    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await handler(behavior)(1, context)
    details = context.status.removeprefix("NOT_FOUND: ")
    size = len(quote(details, safe=PLAIN))
    assert MAX_DETAILS - 20 < size <= MAX_DETAILS
    assert details.startswith(f"begin {character}")
    assert details.endswith(f"{character} end")
    assert details.count(" ... ") == 1


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        *((text, text) for text in (f"{'x' * 199} " * 20, f"{'%' * 133} " * 10)),
        ("half a pair: \ud800", "half a pair: ?"),
    ],
)
async def test_details_that_just_fit_are_whole(handler, text, sent):
    async def behavior(message, call):
        raise ModelNotFoundError(text)

    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await handler(behavior)(1, context)
    assert context.status == f"NOT_FOUND: {sent}"


class TestAccess:
    @staticmethod
    def _refuse(metadata) -> Principal:
        raise UnauthenticatedError("no key")

    async def test_without_a_key_nothing_is_begun(self, handler, reported):
        begun = []

        async def behavior(message, call):
            begun.append(message)

        context = Context()
        with pytest.raises(grpc.aio.AbortError):
            await handler(behavior, self._refuse)(1, context)
        assert (context.status, begun) == ("UNAUTHENTICATED: no key", [])
        assert reported[0].status == "UNAUTHENTICATED"

    async def test_the_message_is_read_with_a_key_only(self):
        def authenticate(metadata) -> Principal:
            return LOCAL if metadata.get("authorization") == "Bearer k" else self._refuse(metadata)

        async def behavior(message, call):
            return message

        calls = Calls(Telemetry(), authenticate, BodyMemory(), 60.0)
        for name in ("/s/M", *OPEN_RPCS):
            calls.add(Rpc(name=name, behavior=behavior, response=pb.ServerLiveResponse))

        def reads(name: str, *metadata: tuple[str, str]) -> bool:
            details = types.SimpleNamespace(method=name, invocation_metadata=metadata)
            return not calls.service(details).request_streaming

        assert reads("/s/M", ("authorization", "Bearer k"))
        assert not reads("/s/M")
        assert not any(reads(name) for name in OPEN_RPCS)
        assert calls.service(types.SimpleNamespace(method="/s/N", invocation_metadata=())) is None

    @pytest.mark.parametrize("name", sorted(OPEN_RPCS))
    async def test_open_methods_serve_a_caller_without_rights(self, handler, name):
        async def behavior(message, call):
            return call.principal

        principal = await handler(behavior, self._refuse, name=name)(1, Context())
        assert principal != LOCAL
        rights = principal.rights
        assert not any((rights.operator, rights.models, rights.use, rights.list, rights.manage))
        closed = handler(behavior, self._refuse, health_is_open=False, name=name)
        with pytest.raises(grpc.aio.AbortError):
            await closed(1, Context())


def test_every_rpc_of_the_protocol_is_there():
    rpcs = {rpc.name for rpc in TritonServicer(TritonService(EchoService()), 1000).rpcs()}
    assert rpcs == {f"/inference.GRPCInferenceService/{method.name}" for method in SERVICE.methods}
