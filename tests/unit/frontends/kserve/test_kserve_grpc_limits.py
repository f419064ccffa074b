"""What a gRPC client may send, and how many may be there."""

import re

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import by_api_key
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.grpc.server import GrpcLimits, GrpcServer
from loraplex.frontends.kserve.grpc.wire import MessageReader
from loraplex.frontends.kserve.service import TritonService
from loraplex.serving.access.api_key_ring import ApiKeys
from support.echo_service import EchoService
from support.naming import naming
from support.scripted_engine import until

LIMITS = GrpcLimits.of(ServerConfig())


@pytest.fixture
async def started():
    """A function (**limits) -> address."""
    servers: list[GrpcServer] = []

    async def start(messages=None, **fields) -> str:
        limits = msgspec.structs.replace(LIMITS, **fields)
        service = TritonService(EchoService(("m",)))
        servers.append(GrpcServer(service, "127.0.0.1", 0, limits=limits, messages=messages))
        await servers[-1].start()
        return f"127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        await server.stop(0)


def channel_to(address: str) -> grpc.aio.Channel:
    # Its own connection: channels with equal arguments share one.
    return grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))


async def live(channel: grpc.aio.Channel, metadata=(), **options) -> bool:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    response = await stub.ServerLive(pb.ServerLiveRequest(), metadata=metadata, **options)
    return response.live


async def test_large_messages(started):
    async with channel_to(await started(max_message_bytes=1024)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="x" * 2000))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await live(channel)


async def test_messages_of_all_calls_have_one_memory_limit(started):
    memory = BodyMemory(200_000, 200_000)
    async with channel_to(await started(messages=memory)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="max_bodies_bytes") as refused:
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="x" * 300_000))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(refused.value.trailing_metadata())["retry-after"] == "1"
        await until(lambda: memory.num_bytes == 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="x" * 200_000))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await until(lambda: memory.num_bytes == 0)


async def test_messages_of_a_stream_count_until_they_have_their_response(started):
    memory = BodyMemory(200_000, 200_000)
    async with channel_to(await started(messages=memory)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        for size in (300_000, 200_000):
            await call.write(pb.ModelInferRequest(model_name="x" * size))
            message = (await call.read()).error_message
            assert ("max_bodies_bytes" in message) is (size == 300_000), message[:200]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await until(lambda: memory.num_bytes == 0)


async def test_large_metadata(started):
    async with channel_to(await started(max_metadata_bytes=2000)) as channel:
        assert await live(channel, (("a", "x" * 1000),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await live(channel, (("a", "x" * 3000),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await live(channel)


async def test_calls_beyond_the_limit_wait(started):
    async with channel_to(await started(max_streams=2)) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        calls = [watch(b"") for _ in range(2)]
        for call in calls:
            assert await call.read() == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await live(channel, timeout=0.3)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        calls[0].cancel()
        assert await live(channel, timeout=60)
        calls[1].cancel()


async def test_connections_beyond_the_limit(started):
    address = await started(max_connections=1)
    async with channel_to(address) as first, channel_to(address) as second:
        assert await live(first)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await live(second, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await live(first)


@pytest.fixture
async def with_keys(monkeypatch):
    """Channel to a server that needs a key, and fails if it reads a message."""
    monkeypatch.setattr(MessageReader, "read", None)
    keys = ApiKeys(None, given=["a key of a test"])
    service = TritonService(EchoService(("m",)))
    server = GrpcServer(service, "127.0.0.1", 0, authenticate=by_api_key(keys), limits=LIMITS)
    await server.start()
    async with channel_to(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop(0)


async def test_no_message_is_read_without_a_key(with_keys):
    """A client may not fill the server's memory before it has shown a key."""
    service, message = "/inference.GRPCInferenceService", bytes(32 << 20)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await with_keys.unary_unary(f"{service}/ModelInfer")(message)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    stream = with_keys.stream_stream(f"{service}/ModelStreamInfer")(iter([message]))
    assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("message", [b"", b"not a message", bytes(32 << 20)])
async def test_open_calls_ignore_their_message(with_keys, message):
    live = with_keys.unary_unary("/inference.GRPCInferenceService/ServerLive")
    assert await live(message, timeout=60) == b"\x08\x01"
    assert await with_keys.unary_unary("/grpc.health.v1.Health/Check")(message) == b"\x08\x01"


async def test_many_inputs_are_refused_before_they_are_objects(started):
    async with channel_to(await started()) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await infer(b"\x2a\x00" * 100_000)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.search(naming(16384), refused.value.details())
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await stream.write(b"\x2a\x00" * 100_000)
        response = pb.ModelStreamInferResponse.FromString(await stream.read())
        assert re.search(naming(16384), response.error_message)
        stream.cancel()
