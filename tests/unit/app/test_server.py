"""The serving process from start to stop, on fake engines and free ports."""

import asyncio
import contextlib
import json
import signal
import socket

import pytest

from loraplex.app.server import done_before
from loraplex.core.errors import ConfigError
from support.fake_engine_process import FakeEngineSettings
from support.naming import naming


async def test_it_says_where_and_serves(run):
    server = run()
    await server.until_ready()
    assert server.lines == [
        f"Started GRPCInferenceService at 127.0.0.1:{server.port('grpc')}",
        f"Started HTTPService at 127.0.0.1:{server.port('http')}",
        f"Started Metrics Service at 127.0.0.1:{server.port('metrics')}",
    ]
    assert (await server.get("/health/ready"))[0] == 200
    assert (await server.get("/v2/health/ready"))[0] == 200
    status, body = await server.complete(max_tokens=3)
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    assert 0 not in server.server.bound_ports.values()
    server.signal()
    await server.ended()
    with socket.create_server(("127.0.0.1", server.port())):
        pass


async def test_the_ports_respond_while_the_engine_starts(run):
    server = run(FakeEngineSettings(start_seconds=0.5))
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                assert (await server.get("/health/ready"))[0] == 503
                break
    assert (await server.get("/health/live"))[0] == 200
    assert (await server.complete())[0] == 503
    assert server.lines == []
    await server.until_ready()
    assert (await server.get("/health/ready"))[0] == 200


async def test_llgtrts_port_opens_when_it_can_serve(run):
    """Its readiness is always true there, whatever the state."""
    server = run(FakeEngineSettings(start_seconds=0.5), dialect="llgtrt_compat")
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                assert (await server.complete())[0] == 200
                break
            await asyncio.sleep(0)
    assert (await server.get("/v1/health/ready"))[0] == 200


@pytest.mark.parametrize("dialect", ["openai", "llgtrt_compat"])
async def test_a_stop_while_it_starts(run, dialect):
    server = run(FakeEngineSettings(start_seconds=0.2), dialect=dialect)
    await asyncio.sleep(0.05)
    server.signal()
    await server.ended()
    assert server.lines == []


async def test_no_probe_finds_it_ready_after_the_signal(run):
    server = run()
    await server.until_ready()
    server.server._on_signal(signal.SIGTERM)
    # Before any other turn of the event loop.
    assert server.server._draining.reason == "the server is stopping"
    await server.ended()


async def test_an_engine_that_cannot_start_ends_it(run):
    server = run(FakeEngineSettings(failure=ConfigError("no weights").to_info()))
    with pytest.raises(ConfigError, match="no weights"):
        await server.ended()
    assert server.lines == []


async def test_a_wrong_start_token_is_found_before_the_weights_are_loaded(run):
    model = {"json_start_token": "call"}
    server = run(FakeEngineSettings(start_seconds=600), model=model, dialect="llgtrt")
    with pytest.raises(ConfigError, match=naming("json_start_token", "call")):
        await server.ended()


async def test_a_stop_lets_requests_end(run):
    server = run(FakeEngineSettings(step_seconds=0.005))
    completion = await server.running_completion(max_tokens=60)
    server.signal()
    await server.ended()
    status, body = await completion
    assert (status, body["usage"]["completion_tokens"]) == (200, 60)


async def test_it_is_not_ready_from_the_signal_on(run):
    """Not some turns of a busy event loop later: a probe may be read in the same turn."""
    server = run(FakeEngineSettings(step_seconds=0.005))
    completion = await server.running_completion(max_tokens=60)
    server.signal()
    assert server.server._draining.is_active
    status, body = await server.get("/health/ready")
    assert (status, json.loads(body)["reason"]) == (503, "the server is stopping")
    await server.ended()
    assert (await completion)[0] == 200


async def test_requests_that_take_too_long_are_reported(run, caplog):
    server = run(FakeEngineSettings(step_seconds=0.05), shutdown_seconds=0.1)
    completion = await server.running_completion()
    server.signal()
    await server.ended()
    status, body = await completion
    assert (status, body["error"]["code"]) == (503, "not_ready")
    assert "the shutdown grace period is over" in caplog.text


async def test_a_second_signal_does_not_wait(run):
    server = run(FakeEngineSettings(step_seconds=0.05), shutdown_seconds=600)
    completion = await server.running_completion()
    server.signal()
    await asyncio.sleep(0.05)
    assert not server.task.done()
    server.signal()
    await server.ended()
    assert (await completion)[0] == 503


async def test_ctrl_c_reports_what_the_server_waits_for(run, caplog):
    caplog.set_level("INFO")
    server = run(FakeEngineSettings(step_seconds=0.05), shutdown_seconds=600)
    completion = await server.running_completion()
    server.signal(signal.SIGINT)
    expected = "stopping: 1 request has at most 600 s to end; press Ctrl-C again to stop at once"
    assert expected in caplog.messages
    async with asyncio.timeout(60):
        while not server.server._stop_deadline:
            await asyncio.sleep(0.01)
    server.signal(signal.SIGINT)
    await server.ended()
    assert "stopping at once: running requests end with an error" in caplog.messages
    assert (await completion)[0] == 503


async def test_ctrl_c_without_requests(run, caplog):
    caplog.set_level("INFO")
    server = run()
    await server.until_ready()
    server.signal(signal.SIGINT)
    await server.ended()
    assert "stopping: no request is running" in caplog.messages
    assert "stopping at once: running requests end with an error" not in caplog.messages


@pytest.mark.parametrize("port", ["http_port", "metrics_port", "grpc_port"])
async def test_a_port_in_use_is_named(run, port):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        server = run(**{port: number})
        with pytest.raises(ConfigError, match=f"127.0.0.1:{number}") as caught:
            await server.ended()
    assert "\n" not in caught.value.message
    assert server.lines == []


class TestDoneBefore:
    async def test_work_that_is_done(self):
        assert await done_before(asyncio.Event(), asyncio.sleep(0))

    async def test_work_that_is_overtaken(self):
        event = asyncio.Event()
        ended = []

        async def work():
            try:
                event.set()
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        assert not await done_before(event, work())
        assert ended == [True]

    async def test_work_that_fails(self):
        async def work():
            raise ConfigError("no")

        with pytest.raises(ConfigError, match="no"):
            await done_before(asyncio.Event(), work())

    async def test_no_task_is_left_when_it_is_cancelled_itself(self):
        before = asyncio.all_tasks()
        task = asyncio.create_task(done_before(asyncio.Event(), asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == before
