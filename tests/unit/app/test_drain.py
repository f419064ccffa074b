"""POST /drain on a whole server, and what its clients see meanwhile."""

import asyncio
import json
import re
import urllib.error
import urllib.request

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.fake_engine_process import FakeEngineSettings
from support.naming import naming
from support.server_in_loop import LONG

SLOW = FakeEngineSettings(step_seconds=0.01)


def send(url: str, method: str, body: bytes | None = None) -> tuple[int, dict, dict]:
    """(status, headers, body)"""
    request = urllib.request.Request(url, body, method=method)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, lowered(response.headers), json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, lowered(error.headers), json.loads(error.read() or b"{}")


def lowered(headers) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@pytest.fixture
def drain():
    """A function (server, method, body) -> (status, body)."""

    async def call(server, method="GET", body=None) -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        status, _, reported = await asyncio.to_thread(send, server.url("/drain"), method, data)
        return status, reported

    return call


async def test_what_is_in_work_ends_and_nothing_begins(run, drain):
    server = run(SLOW)
    completion = await server.running_completion(max_tokens=60)
    status, report = await drain(server, "POST", {"timeout_seconds": 60})
    assert status == 202
    assert (report["draining"], report["in_work"], report["drained"]) == (True, 1, False)
    assert 0 < report["seconds_left"] <= 60

    assert (await server.get("/health/ready"))[0] == 503
    assert "the server is draining" in (await server.get("/health/ready"))[1]
    assert (await server.get("/v2/health/ready"))[0] == 400
    assert (await server.get("/v2/models/ensemble/ready"))[0] == 400
    assert (await server.get("/health/live"))[0] == 200
    url = server.url("/v1/completions")
    status, headers, body = await asyncio.to_thread(send, url, "POST", json.dumps(LONG).encode())
    assert (status, body["error"]["code"]) == (503, "not_ready")
    assert (headers["retry-after"], headers["connection"]) == ("2", "close")

    status, body = await completion
    assert (status, body["usage"]["completion_tokens"]) == (200, 60)
    status, report = await drain(server)
    assert (status, report["in_work"], report["drained"]) == (200, 0, True)
    assert (await drain(server, "POST"))[0] == 200

    status, report = await drain(server, "DELETE")
    assert (status, report["draining"]) == (200, False)
    assert (await server.get("/health/ready"))[0] == 200
    assert (await server.complete(max_tokens=2))[0] == 200


async def test_grpc_is_reported(run, drain):
    server = run(SLOW)
    await server.until_ready()
    await drain(server, "POST")
    address = f"127.0.0.1:{server.port('grpc')}"
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert not (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
        assert (await stub.ServerLive(service_pb2.ServerLiveRequest())).live
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x02"


async def test_the_time_is_up(run, drain, caplog):
    server = run(SLOW)
    completion = await server.running_completion()
    await drain(server, "POST", {"timeout_seconds": 0.1})
    status, body = await asyncio.wait_for(completion, 60)
    assert (status, body["error"]["code"]) == (503, "not_ready")
    assert re.search(naming("shutdown"), body["error"]["message"])
    assert (await drain(server))[1]["drained"]
    async with asyncio.timeout(60):  # the engine is reported, too
        while (await stats_of(server))["models"]["m"]["engine"]["num_running"]:
            await asyncio.sleep(0.02)
    await drain(server, "DELETE")
    assert (await server.complete(max_tokens=2))[0] == 200
    assert "the drain's time is over: " in caplog.text


async def test_a_stop_cannot_be_undone(run, drain):
    server = run(SLOW)
    completion = await server.running_completion(max_tokens=100)
    server.signal()
    async with asyncio.timeout(60):
        while not (await drain(server))[1]["draining"]:
            pass
    status, body = await drain(server, "DELETE")
    assert (status, body["error"]["code"]) == (503, "not_ready")
    assert (await completion)[0] == 200


async def test_bad_bodies(run):
    server = run()
    await server.until_ready()
    for body, word in (
        (b"{", "not JSON"),
        (b"[]", "timeout_seconds"),
        (b'{"seconds": 1}', "timeout_seconds"),
        (b'{"timeout_seconds": -1}', "0 to 86400"),
        (b'{"timeout_seconds": true}', "0 to 86400"),
        (b'{"timeout_seconds": "1"}', "0 to 86400"),
        (b'{"timeout_seconds": 1e999}', ""),
    ):
        status, _, reported = await asyncio.to_thread(send, server.url("/drain"), "POST", body)
        assert status == 400, body
        assert word in reported["error"]["message"]
        assert (await server.get("/health/ready"))[0] == 200


async def test_streams_go_on_to_their_end(run):
    """Requests that run at the signal, and some that arrive later: none is lost or incomplete."""
    server = run(SLOW, shutdown_seconds=60)
    await server.until_ready()
    body = json.dumps(LONG | {"max_tokens": 50, "stream": True}).encode()

    async def stream() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        data = await reader.read()
        writer.close()
        return data

    port = server.port()
    early = [asyncio.create_task(stream()) for _ in range(8)]
    async with asyncio.timeout(60):
        while (await stats_of(server))["drain"]["in_work"] < 8:
            await asyncio.sleep(0.01)
    server.signal()
    await asyncio.sleep(0.05)
    late = await asyncio.gather(*(stream() for _ in range(4)))
    for data in late:
        assert data.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 2" in data
    for data in await asyncio.gather(*early):
        assert data.startswith(b"HTTP/1.1 200")
        assert data.count(b"data: {") == 50 or data.count(b'"text"') > 0
        assert b"data: [DONE]" in data
        assert b'"finish_reason":"length"' in data
    await server.ended()


async def stats_of(server) -> dict:
    return json.loads((await server.get("/v1/internal/stats"))[1])


async def test_statistics_of_the_server(run):
    server = run()
    await server.until_ready()
    await server.complete(max_tokens=3)
    await server.complete(model="nobody")
    reported = await stats_of(server)
    assert (reported["live"], reported["ready"], reported["reason"]) == (True, True, "")
    assert reported["uptime_seconds"] > 0
    assert reported["drain"] == {
        "draining": False,
        "in_work": 0,
        "drained": False,
        "elapsed_seconds": None,
        "seconds_left": None,
    }
    assert reported["open_requests"]["http"] == 1
    assert reported["http_connections"]["open"] >= 1
    assert reported["access_log"] is None
    use = reported["tenants"]["default"]
    assert (use["prompts"], use["completion_tokens"], use["errors"]) == (1, 3, 1)
    assert reported["models"]["m"]["ready"]
    assert reported["models"]["m"]["engine"]["generation_tokens"] == 3


async def test_metrics_of_the_wire(run, tmp_path):
    server = run(access_log=str(tmp_path / "log"))
    await server.until_ready()
    await server.complete(model="nobody")
    port = server.port("metrics")
    status, _ = await server.get("/metrics")
    assert status == 200
    text = await asyncio.to_thread(
        lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    )
    refused = 'loraplex_wire_requests_total{code="model_not_found",protocol="http",status="404"} 1'
    assert refused in text
    assert 'loraplex_open_requests{protocol="http"} 0' in text
    assert "loraplex_http_connections " in text
    assert "loraplex_access_log_dropped_lines_total 0" in text
