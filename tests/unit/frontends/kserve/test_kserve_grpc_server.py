"""The gRPC server on the loop of its backend: slow clients, ends of calls, starts and stops."""

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import uvloop
from msgspec.structs import replace
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from loraplex.core.errors import ConfigError, NotReadyError, RateLimitedError
from loraplex.core.output import FinishReason, RequestOutput, RequestTiming, SequenceOutput
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve import shared_memory
from loraplex.frontends.kserve.grpc import server as grpc_server
from loraplex.frontends.kserve.grpc.server import NO_LIMITS, GrpcServer
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.wire_request import WireRequest
from support.echo_service import EchoService
from support.naming import naming

PIECE = "x" * 100_000
WITHIN = 60.0
"""Seconds that anything here may take."""


class Outputs(AsyncIterator[RequestOutput]):
    """One large piece after another; knows how many were taken, and whether it was closed."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self.num_taken = 0
        self.is_closed = False

    async def __anext__(self) -> RequestOutput:
        if self.num_taken == self._request.sampling.max_tokens:
            raise StopAsyncIteration
        self.num_taken += 1
        is_last = self.num_taken == self._request.sampling.max_tokens
        reason = FinishReason.LENGTH if is_last else None
        return RequestOutput(
            request_id=self._request.request_id,
            client_request_id="",
            model=self._request.model,
            adapters=(),
            prompt_token_ids=(1,),
            sequences=(SequenceOutput(0, PIECE, (1,), (), reason),),
            num_output_tokens=self.num_taken,
            finished=is_last,
            timing=RequestTiming(0) if is_last else None,
        )

    async def aclose(self) -> None:
        self.is_closed = True


class LargePieces(EchoService):
    """Waits for nothing once it may begin: nothing but the client can hold it up."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Outputs] = []
        self.may_begin = asyncio.Event()
        self.may_begin.set()

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        del principal
        outputs = Outputs(request)
        self.outputs.append(outputs)
        await self.may_begin.wait()
        return outputs

    @property
    def num_taken(self) -> int:
        return sum(outputs.num_taken for outputs in self.outputs)


@pytest.fixture
async def serve():
    """A function (backend or its service, **of the server) -> the server, a channel to it."""
    servers, channels = [], []

    async def start(
        behind: EchoService | TritonService, **more: Any
    ) -> tuple[GrpcServer, grpc.aio.Channel]:
        service = behind if isinstance(behind, TritonService) else TritonService(behind)
        servers.append(GrpcServer(service, "127.0.0.1", 0, **more))
        await servers[-1].start()
        channels.append(channel_to(servers[-1].port))
        return servers[-1], channels[-1]

    yield start
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(0)


@contextlib.asynccontextmanager
async def relay_to(port: int, is_read: asyncio.Event) -> AsyncIterator[int]:
    """Relay connections to a port; yield its own. It reads responses while is_read is set."""

    async def pass_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_read: asyncio.Event
    ) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while await may_read.wait() and (data := await reader.read(1 << 16)):
                writer.write(data)
                await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", port)
        always = asyncio.Event()
        always.set()
        passing = (pass_on(reader, to_server[1], always), pass_on(to_server[0], writer, is_read))
        ways.extend(map(asyncio.ensure_future, passing))

    ways: list[asyncio.Future[Any]] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for way in ways:
        way.cancel()
    await asyncio.wait(ways)


def channel_to(port: int) -> grpc.aio.Channel:
    # Its own connection: channels with equal arguments share one.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)


def stub_of(channel: grpc.aio.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request_of(max_tokens: int, request_id: str = "", *, streamed: bool = True):
    message = pb.ModelInferRequest(model_name="ensemble", id=request_id)
    rows = [
        ("text_input", "BYTES", {"bytes_contents": [b"x"]}),
        ("max_tokens", "INT32", {"int_contents": [max_tokens]}),
        ("stream", "BOOL", {"bool_contents": [streamed]}),
        ("end_id", "INT32", {"int_contents": [-1]}),
    ]
    for name, datatype, contents in rows:
        message.inputs.add(name=name, datatype=datatype, shape=[1, 1], contents=contents)
    return message


def is_final(response) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN):
        while not condition():
            await asyncio.sleep(0.01)


async def held_up(count: Callable[[], int]) -> int:
    """What is counted once it has stood still for a while."""
    async with asyncio.timeout(WITHIN):
        last = -1
        while (now := count()) != last or now == 0:
            last = now
            await asyncio.sleep(0.3)
    return last


async def test_a_client_that_does_not_read_holds_up_nothing_but_its_own_requests(serve):
    backend = LargePieces()
    server, channel = await serve(backend)
    unread = stub_of(channel).ModelStreamInfer()
    for number in range(3):
        await unread.write(request_of(100_000, str(number)))
    taken = await held_up(lambda: backend.num_taken)
    assert taken * len(PIECE) < 50_000_000, "output that is not read is not produced"
    assert len(backend.outputs) == 3
    # Over the same connection, and over another one:
    async with channel_to(server.port) as other:
        for stub in (stub_of(channel), stub_of(other)):
            reply = await stub.ModelInfer(request_of(2, streamed=False), timeout=WITHIN)
            assert reply.raw_output_contents
    assert (await stub_of(channel).ServerLive(pb.ServerLiveRequest(), timeout=WITHIN)).live
    assert sum(outputs.num_taken for outputs in backend.outputs[:3]) == taken
    unread.cancel()
    await until(lambda: all(outputs.is_closed for outputs in backend.outputs))


async def test_the_requests_of_a_stream_that_is_not_read_end(serve):
    backend = LargePieces()
    _, channel = await serve(backend, limits=replace(NO_LIMITS, unread_seconds=0.01))
    unread = stub_of(channel).ModelStreamInfer()
    backend.may_begin.clear()  # else the stream may end before the last request has come
    for number in range(3):
        await unread.write(request_of(100_000, str(number)))
    await until(lambda: len(backend.outputs) == 3)
    backend.may_begin.set()
    await until(lambda: all(outputs.is_closed for outputs in backend.outputs))
    unread.cancel()


async def test_a_client_that_does_not_read_its_connection_is_disconnected(serve, monkeypatch):
    """It does not reply to gRPC's pings either."""
    monkeypatch.setattr(grpc_server, "_KEEPALIVE_TIMEOUT_MS", 100)
    backend = LargePieces()
    server, _ = await serve(backend, limits=replace(NO_LIMITS, keepalive_seconds=0.1))
    is_read = asyncio.Event()
    is_read.set()
    async with relay_to(server.port, is_read) as port, channel_to(port) as channel:
        stream = stub_of(channel).ModelStreamInfer()
        await stream.write(request_of(100_000))
        await stream.read()
        is_read.clear()
        await until(lambda: backend.outputs[0].is_closed)


async def test_a_long_response_counts_until_its_client_has_read_it(serve):
    responses, is_read = ResponseMemory(), asyncio.Event()
    is_read.set()
    server, _ = await serve(LargePieces(), responses=responses)
    async with relay_to(server.port, is_read) as port, channel_to(port) as channel:
        stub = stub_of(channel)
        assert (await stub.ServerLive(pb.ServerLiveRequest(), timeout=WITHIN)).live
        is_read.clear()
        call = stub.ModelInfer(request_of(200, streamed=False), timeout=WITHIN)
        assert await held_up(lambda: responses.num_bytes) >= 200 * len(PIECE)
        is_read.set()
        assert (await call).raw_output_contents
        await until(lambda: responses.num_bytes == 0)


async def test_a_long_response_is_refused_while_others_take_the_memory(serve):
    responses = ResponseMemory(20 * len(PIECE), 20 * len(PIECE))
    _, channel = await serve(LargePieces(), responses=responses)
    with pytest.raises(grpc.aio.AioRpcError, match="max_bodies_bytes") as refused:
        await stub_of(channel).ModelInfer(request_of(21, streamed=False), timeout=WITHIN)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await stub_of(channel).ModelInfer(request_of(19, streamed=False), timeout=WITHIN)
    await until(lambda: responses.num_bytes == 0)


async def test_a_slow_client_gets_every_piece(serve):
    _, channel = await serve(LargePieces())
    stream = stub_of(channel).ModelStreamInfer()
    for request_id in ("a", "b"):
        await stream.write(request_of(40, request_id))
    await stream.done_writing()
    await asyncio.sleep(0.3)
    responses = [response async for response in stream]
    assert await stream.code() is grpc.StatusCode.OK
    for request_id in ("a", "b"):
        finals = [is_final(r) for r in responses if r.infer_response.id == request_id]
        assert finals == [False] * 39 + [True]


async def test_an_error_ends_a_stream_whose_client_does_not_read(serve):
    """Another request of it is in the middle of a write."""
    backend = LargePieces()
    _, channel = await serve(backend)
    stream = stub_of(channel).ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await stream.write(request_of(100_000))
    await held_up(lambda: backend.num_taken)
    await stream.write(pb.ModelInferRequest(model_name="nope"))
    await until(lambda: backend.outputs[0].is_closed)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in stream:
            pass
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_error_in_the_middle_comes_after_the_pieces(serve):
    backend = EchoService()
    _, channel = await serve(backend)
    backend.plant(NotReadyError("gone"), after_outputs=3)
    stream = stub_of(channel).ModelStreamInfer(iter([request_of(10)]))
    responses = [response async for response in stream]
    assert [bool(response.error_message) for response in responses] == [False] * 3 + [True]


async def test_a_client_that_goes_is_no_defect(serve, caplog):
    """Whatever its requests were doing: nothing is logged, and all of them are aborted."""
    backend = LargePieces()
    server, _ = await serve(backend)
    for _ in range(10):
        channel = channel_to(server.port)
        stream = stub_of(channel).ModelStreamInfer()
        for _ in range(3):
            await stream.write(request_of(100_000))
        await stream.read()
        await channel.close()
    await until(lambda: all(outputs.is_closed for outputs in backend.outputs))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_what_may_be_read_from_regions_is_a_limit_of_each_request(
    serve, tmp_path, monkeypatch
):
    (tmp_path / "r").write_bytes(b"\5\0\0\0hello")
    monkeypatch.setattr(shared_memory, "MAX_REQUEST_BYTES", 15)
    service = TritonService(EchoService())
    service.memory = shared_memory.SharedMemory(tmp_path)
    service.memory.register(LOCAL.tenant, "r", "/r", 0, 9)
    _, channel = await serve(service)
    request = request_of(1)
    request.inputs[0].ClearField("contents")
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 9
    stream = stub_of(channel).ModelStreamInfer(iter([request] * 3))
    assert [response.error_message async for response in stream] == [""] * 3


async def test_a_refusal_reports_its_id_and_when_to_retry(serve):
    backend = EchoService()
    _, channel = await serve(backend)
    backend.plant(RateLimitedError("too many", retry_after_seconds=2.2))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(channel).ModelInfer(
            request_of(1, streamed=False), metadata=(("x-request-id", "mine"),)
        )
    assert dict(raised.value.trailing_metadata()) == {"x-request-id": "mine", "retry-after": "3"}


@pytest.mark.parametrize("character", ["x", "é", "漢"])
async def test_a_long_text_of_the_client_does_not_hide_the_status(serve, character):
    _, channel = await serve(EchoService())
    request = pb.ModelInferRequest(model_name=character * 20_000)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(channel).ModelInfer(request)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    # Triton's text.
    assert f"unknown model: '{character}" in raised.value.details()
    assert re.search(naming("tensorrt_llm_bls, echo"), raised.value.details())


def raw_method(channel: grpc.aio.Channel, name: str, ways: str):
    """Sends bytes as they are."""
    return getattr(channel, ways)(
        f"/inference.GRPCInferenceService/{name}",
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )


async def test_bytes_that_are_no_message_are_an_invalid_argument(serve, caplog):
    reported: list[WireRequest] = []
    _, channel = await serve(EchoService(), telemetry=Telemetry([reported.append]))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await raw_method(channel, "ModelInfer", "unary_unary")(
            b"\xff\xff\xff", metadata=(("x-request-id", "mine"),)
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(naming("early"), raised.value.details())
    assert dict(raised.value.trailing_metadata()) == {"x-request-id": "mine"}
    await until(lambda: bool(reported))
    assert [(r.status, r.error_code) for r in reported] == [("INVALID_ARGUMENT", "invalid_request")]
    assert not [record for record in caplog.records if record.name.startswith("loraplex")]


async def test_bytes_that_are_no_message_leave_the_rest_of_a_stream_alone(serve):
    reported: list[WireRequest] = []
    backend = EchoService(delay_seconds=0.02)
    _, channel = await serve(backend, telemetry=Telemetry([reported.append]))
    stream = raw_method(channel, "ModelStreamInfer", "stream_stream")(
        iter([request_of(5, "a").SerializeToString(), b"\xff\xff\xff"])
    )
    responses = [response async for response in stream]
    assert await stream.code() is grpc.StatusCode.OK
    [failure] = [r for r in responses if r.error_message]
    assert re.search(naming("early"), failure.error_message)
    assert is_final(failure)
    assert [is_final(r) for r in responses if r is not failure] == [False] * 4 + [True]
    await until(lambda: len(reported) == 3)
    assert sorted(r.status for r in reported) == ["INVALID_ARGUMENT", "OK", "OK"]


async def test_bytes_that_are_no_message_end_a_stream_that_wants_it_so(serve):
    _, channel = await serve(EchoService())
    stream = raw_method(channel, "ModelStreamInfer", "stream_stream")(
        iter([b"\xff\xff\xff"]), metadata=(("triton_grpc_error", "true"),)
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stream.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stop_lets_calls_end_for_a_while_and_then_cancels_them(serve):
    backend = EchoService(delay_seconds=600)
    server, channel = await serve(backend)
    endless = asyncio.ensure_future(stub_of(channel).ModelInfer(request_of(4000, streamed=False)))
    await until(lambda: len(backend.requests) == 1)
    backend.delay_seconds = 0.01
    short = asyncio.ensure_future(stub_of(channel).ModelInfer(request_of(3, streamed=False)))
    await until(lambda: len(backend.requests) == 2)
    await server.stop(2.0)
    assert (await short).raw_output_contents
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await endless
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await until(lambda: len(backend.aborted) == 1)


async def test_a_taken_port_is_an_error_of_the_operator(serve):
    first, _ = await serve(EchoService())
    second = GrpcServer(TritonService(EchoService()), "127.0.0.1", first.port)
    with pytest.raises(ConfigError, match=naming("127.0.0.1", first.port)):
        await second.start()
    await first.stop(0)
    await first.stop(0)


async def _one_of_each_kind() -> None:
    """A unary call, a stream and a cancelled stream, from a start to a stop."""
    backend = EchoService()
    server = GrpcServer(TritonService(backend), "127.0.0.1", 0)
    await server.start()
    async with channel_to(server.port) as channel:
        assert (await stub_of(channel).ModelInfer(request_of(3, streamed=False))).outputs
        stream = stub_of(channel).ModelStreamInfer(iter([request_of(3)]))
        assert [is_final(response) async for response in stream] == [False, False, True]
        backend.delay_seconds = 0.01
        cut = stub_of(channel).ModelStreamInfer()
        await cut.write(request_of(4000))
        await cut.read()
        cut.cancel()
        await until(lambda: len(backend.aborted) == 1)
    await server.stop(0)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_every_loop_will_do_and_one_after_another(new_loop, caplog):
    def run(work: Callable[[], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(work())

    gc.collect()  # what other tests left may be logged when it is collected
    caplog.clear()
    for _ in range(3):
        run(_one_of_each_kind)
    assert not caplog.records
