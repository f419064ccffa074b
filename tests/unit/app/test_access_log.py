"""What a whole server writes down of requests on its wires."""

import asyncio
import json
import queue
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loraplex.frontends.kserve.stub.connection import Connection
from loraplex.frontends.kserve.stub.wire import Infer, WireTensor
from support.fake_engine_process import FakeEngineSettings

LINE_KEYS = [
    *("time", "request_id", "trace_id", "protocol", "client", "tenant", "method", "route", "path"),
    *("status", "error", "seconds", "prompt_tokens", "completion_tokens", "user_agent"),
    "generations",
]
GENERATION_KEYS = [
    *("model", "task", "adapters", "client_request_id", "prompt_tokens", "completion_tokens"),
    *("cached_tokens", "queue_seconds", "first_token_seconds", "seconds", "finish_reasons"),
    "error",
]
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "access.log"


async def lines(log: Path, path: str, count: int = 1) -> list[dict]:
    """The lines of a path, once there are so many."""
    async with asyncio.timeout(60):
        while True:
            text = log.read_text() if log.exists() else ""
            found = [json.loads(line) for line in text.splitlines()]
            found = [line for line in found if line["path"] == path]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.02)


def post(url: str, body: dict, headers: dict) -> tuple[int, dict]:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers)


async def test_a_completion(run, log):
    server = run(access_log=str(log))
    await server.until_ready()
    body = {"model": "m", "prompt": ["secret words", "x"], "max_tokens": 3, "ignore_eos": True}
    headers = {
        "x-request-id": "my-id",
        "user-agent": "tests/1 " + "a" * 500,
        "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
        "authorization": "Bearer SECRET",
    }
    url = server.url("/v1/completions?key=SECRET")
    status, responded = await asyncio.to_thread(post, url, body, headers)
    assert (status, responded["x-request-id"]) == (200, "my-id")
    [line] = await lines(log, "/v1/completions")
    assert list(line) == LINE_KEYS
    assert (line["request_id"], line["trace_id"]) == ("my-id", TRACE)
    assert (line["protocol"], line["method"], line["client"]) == ("http", "POST", "127.0.0.1")
    assert (line["route"], line["status"], line["error"]) == ("/v1/completions", 200, None)
    assert line["tenant"] == "default"
    assert line["user_agent"] == ("tests/1 " + "a" * 500)[:200]
    assert line["completion_tokens"] == 6
    assert len(line["generations"]) == 2
    for one in line["generations"]:
        assert list(one) == GENERATION_KEYS
        assert (one["model"], one["task"], one["adapters"]) == ("m", "generate", [])
        assert (one["completion_tokens"], one["finish_reasons"]) == (3, ["length"])
        assert 0 <= one["queue_seconds"] <= one["first_token_seconds"] <= one["seconds"]
        assert one["seconds"] <= line["seconds"]
        assert one["cached_tokens"] is not None
    assert line["prompt_tokens"] == sum(one["prompt_tokens"] for one in line["generations"])
    text = log.read_text()
    assert "SECRET" not in text
    assert "secret words" not in text


async def test_prompts_if_requested(run, log):
    server = run(access_log=str(log), access_log_prompts=True)
    await server.until_ready()
    await server.complete(prompt="these words", max_tokens=1)
    [line] = await lines(log, "/v1/completions")
    assert line["generations"][0]["prompt"] == "these words"


async def test_errors_have_their_code(run, log):
    server = run(access_log=str(log))
    await server.until_ready()
    await server.complete(model="nobody")
    await server.complete(temperature=-1)
    await server.get("/v2/models/nobody")
    await server.get("/v1/iterations?limit=x")
    first, second = await lines(log, "/v1/completions", 2)
    assert (first["status"], first["error"]) == (404, "model_not_found")
    assert (second["status"], second["error"]) == (400, "invalid_parameter")
    [line] = await lines(log, "/v2/models/nobody")
    assert (line["error"], line["route"]) == ("model_not_found", "/v2/models/{model:path}")
    [line] = await lines(log, "/v1/iterations")
    assert (line["status"], line["error"]) == (400, "invalid_parameter")


async def test_a_client_that_leaves(run, log):
    server = run(FakeEngineSettings(step_seconds=0.02), access_log=str(log))
    await server.until_ready()
    port = server.port()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model": "m", "prompt": "x", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"data: ")
    writer.close()
    [line] = await lines(log, "/v1/completions")
    assert line["status"] == 200
    [one] = line["generations"]
    assert one["finish_reasons"] == ["abort"]
    assert one["completion_tokens"] > 0
    assert one["queue_seconds"] is None


async def test_a_body_that_does_not_come(run, log):
    server = run(access_log=str(log), body_timeout_seconds=0.1)
    await server.until_ready()
    port = server.port()
    for path, code in (("/v1/completions", b'"code":"body_timeout"'), ("/v2/models/m/infer", b"")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: 100\r\n\r\n{")
        reply = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in reply
        assert b"within 0.1 seconds" in reply
        assert code in reply
        [line] = await lines(log, path)
        assert (line["status"], line["error"]) == (408, "body_timeout")


async def test_grpc(run, log):
    server = run(access_log=str(log))
    await server.until_ready()
    address = f"127.0.0.1:{server.port('grpc')}"
    import grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ServerLive(
            service_pb2.ServerLiveRequest(),
            metadata=(("x-request-id", "g-1"), ("traceparent", f"00-{TRACE}-{'1' * 16}-01")),
        )
        assert (await call).live
        assert dict(await call.trailing_metadata())["x-request-id"] == "g-1"
        call = stub.ModelConfig(service_pb2.ModelConfigRequest(name="nobody"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        responded = dict(raised.value.trailing_metadata())["x-request-id"]
    [live] = await lines(log, "/inference.GRPCInferenceService/ServerLive")
    assert (live["protocol"], live["status"], live["request_id"]) == ("grpc", "OK", "g-1")
    assert (live["method"], live["client"], live["trace_id"]) == (None, "127.0.0.1", TRACE)
    assert live["user_agent"].startswith("grpc-python")
    [line] = await lines(log, "/inference.GRPCInferenceService/ModelConfig")
    assert (line["status"], line["error"]) == ("NOT_FOUND", "model_not_found")
    assert line["request_id"] == responded


async def test_a_grpc_stream_and_its_requests(run, log):
    server = run(access_log=str(log))
    await server.until_ready()
    address = f"127.0.0.1:{server.port('grpc')}"
    async with tritonclient.grpc.aio.InferenceServerClient(address) as client:

        async def requests():
            for request_id, tokens in (("a", 2), ("b", 100_000)):
                yield {
                    "model_name": "ensemble",
                    "request_id": request_id,
                    "inputs": ensemble_inputs("x", tokens),
                }

        results = [error async for _, error in client.stream_infer(requests())]
        assert sorted(error is None for error in results) == [False, True]
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    call, *parts = sorted(await lines(log, path, 3), key=lambda line: line["protocol"])
    assert (call["protocol"], call["generations"]) == ("grpc", [])
    assert [part["protocol"] for part in parts] == ["grpc-stream"] * 2
    good = next(part for part in parts if part["status"] == "OK")
    bad = next(part for part in parts if part["status"] != "OK")
    assert good["generations"][0]["client_request_id"] == "a"
    assert good["completion_tokens"] == 2
    assert (bad["status"], bad["error"] is not None) == ("INVALID_ARGUMENT", True)
    assert {call["request_id"], good["request_id"], bad["request_id"]} == {call["request_id"]}


def ensemble_inputs(text: str, max_tokens: int):
    import numpy as np

    module = tritonclient.grpc
    prompt = module.InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[text]], dtype=object))
    tokens = module.InferInput("max_tokens", [1, 1], "INT32")
    tokens.set_data_from_numpy(np.array([[max_tokens]], dtype=np.int32))
    return [prompt, tokens]


async def test_triton_http_has_ids(run, log):
    server = run(access_log=str(log))
    await server.until_ready()
    body = {"text_input": "x", "max_tokens": 2}
    url = server.url("/v2/models/ensemble/generate")
    status, headers = await asyncio.to_thread(post, url, body, {"x-request-id": "t-1"})
    assert (status, headers["x-request-id"]) == (200, "t-1")
    status, headers = await asyncio.to_thread(post, url, body, {"x-request-id": "two words"})
    assert (status, len(headers["x-request-id"])) == (200, 32)
    first, _ = await lines(log, "/v2/models/ensemble/generate", 2)
    assert first["completion_tokens"] == 2


async def test_a_file_that_cannot_be_written(run, tmp_path):
    from loraplex.core.errors import ConfigError

    server = run(access_log=str(tmp_path))
    with pytest.raises(ConfigError, match="access_log"):
        await server.ended()


async def test_the_request_socket(run, log, tmp_path):
    path = str(tmp_path / "socket")
    server = run(access_log=str(log), request_socket=path)
    await server.until_ready()
    responses: queue.Queue = queue.Queue()
    connection = await asyncio.to_thread(Connection, path, responses.put)
    for model in ("ensemble", "nobody"):
        inputs = (
            WireTensor("text_input", "BYTES", (1, 1), b"\x01\x00\x00\x00x"),
            WireTensor("max_tokens", "INT32", (1, 1), b"\x02\x00\x00\x00"),
        )
        connection.submit(Infer(id=0, model=model, inputs=inputs), responses.put)
    found = await lines(log, "request_socket/Infer", 2)
    bad, good = sorted(found, key=lambda line: line["status"] == "OK")
    await asyncio.to_thread(connection.close)
    assert (good["protocol"], good["status"], good["completion_tokens"]) == ("socket", "OK", 2)
    assert bad["error"] == "model_not_found"
