"""A real server that stops or drains while clients use it, and its access log."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from loraplex.testing.running_server import MODEL, RunningServer, serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("drain")]

TOKENS = 400
BODY = json.dumps(
    {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
).encode()


async def stream(
    server: RunningServer,
    begun: asyncio.Event | None = None,
    received: bytearray | None = None,
) -> bytes:
    """A whole response with its head, as its client gets it; in `received` also if it is cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
    data = bytearray() if received is None else received
    try:
        while chunk := await reader.read(65536):
            data += chunk
            if begun is not None and b"data: {" in data:
                begun.set()
            if data.endswith((b"data: [DONE]\n\n\r\n0\r\n\r\n", b"0\r\n\r\n")):
                break
            if b"\r\n\r\n" in data and b"content-length" in data.lower():
                break
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return bytes(data)


def is_whole(data: bytes) -> bool:
    usage = f'"completion_tokens":{TOKENS}'.encode()
    return data.startswith(b"HTTP/1.1 200") and usage in data and b"[DONE]" in data


async def begun_streams(server: RunningServer, count: int) -> list["asyncio.Task[bytes]"]:
    events = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(stream(server, event)) for event in events]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in events))
    return tasks


async def test_ctrl_c_reports_what_it_waits_for_and_twice_stops(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BODY", BODY.replace(b"400", b"1900"))
    printed = ""
    with serving(tmp_path, "--shutdown-seconds", "300", "--log-level", "warning") as server:
        streams = await begun_streams(server, 8)
        server.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            while "requests have at most 300 s to end; press Ctrl-C again" not in printed:
                await asyncio.sleep(0.02)
                printed += capfd.readouterr().err
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        cut = [data for data in await asyncio.gather(*streams) if not is_whole(data)]
    printed += capfd.readouterr().err
    assert "stopping at once: running requests end with an error" in printed
    assert cut
    assert "Traceback" not in printed


async def test_sigterm_loses_no_stream(tmp_path):
    log = tmp_path / "access.log"
    with serving(tmp_path / "state", "--access-log", str(log)) as server:
        early = await begun_streams(server, 6)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while (ready := await asyncio.to_thread(server.get, "/health/ready"))[0] == 200:
                await asyncio.sleep(0.02)
        assert (ready[0], json.loads(ready[1])["reason"]) == (503, "the server is stopping")
        late = await stream(server)
        assert late.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: " in late
        assert b"\r\nconnection: close" in late.lower()
        for data in await asyncio.gather(*early):
            assert is_whole(data)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requested = [line for line in lines if line["path"] == "/v1/completions"]
    assert sorted(line["status"] for line in requested) == [200] * 6 + [503]
    whole = [line for line in requested if line["status"] == 200]
    assert {line["completion_tokens"] for line in whole} == {TOKENS}
    assert {line["generations"][0]["finish_reasons"][0] for line in whole} == {"length"}


async def test_what_is_reset_at_sigterm_was_never_begun(tmp_path):
    """The ports close before the last connections are accepted: the system resets those."""
    log = tmp_path / "access.log"
    responses: list[bytes] = []
    num_reset = 0

    async def request_until_refused(server: RunningServer) -> None:
        nonlocal num_reset
        while True:
            received = bytearray()
            try:
                await stream(server, received=received)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                num_reset += 1
                assert not received
            if received:
                responses.append(bytes(received))

    with serving(tmp_path / "state", "--access-log", str(log)) as server:
        clients = [asyncio.create_task(request_until_refused(server)) for _ in range(30)]
        await asyncio.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await asyncio.gather(*clients)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    refused = [data for data in responses if data.startswith(b"HTTP/1.1 503")]
    assert all(is_whole(data) for data in responses if data not in refused)
    num_logged = sum('"/v1/completions"' in line for line in log.read_text().splitlines())
    assert num_logged == len(responses)
    assert num_reset <= len(clients)


async def test_drain_and_back(tmp_path):
    with serving(tmp_path / "state") as server:
        early = await begun_streams(server, 3)
        status, report = await asyncio.to_thread(server.post, "/drain", {"timeout_seconds": 60})
        assert (status, report["in_work"]) == (202, 3)
        assert (await stream(server)).startswith(b"HTTP/1.1 503")
        assert all(is_whole(data) for data in await asyncio.gather(*early))
        await asyncio.to_thread(until_drained, server)
        assert await asyncio.to_thread(server.delete, "/drain") == 200
        assert is_whole(await stream(server))
        assert await asyncio.to_thread(server.stop) == 0


def until_drained(server: RunningServer) -> None:
    deadline = time.monotonic() + 60
    while not json.loads(server.get("/drain")[1])["drained"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_logs_can_be_rotated(tmp_path):
    log, old = tmp_path / "access.log", tmp_path / "access.log.1"
    with serving(tmp_path / "state", "--access-log", str(log)) as server:
        server.get("/v1/models")
        until_logged(log, "/v1/models")
        log.rename(old)
        os.kill(server.process.pid, signal.SIGHUP)
        server.get("/v2")
        until_logged(log, "/v2")
        assert server.stop() == 0
    assert "/v2" not in [json.loads(line)["path"] for line in old.read_text().splitlines()]


def until_logged(log: Path, path: str) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or f'"path":"{path}"' not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
