"""The serving process from start to stop, on fake engines and free ports."""

import asyncio
import contextlib
import json
import socket

import msgspec
import pytest

from loraplex.app.launch import EngineLauncher
from loraplex.app.server import Server, bind, unless
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.testing.capitals import BASE_PATH
from loraplex.testing.fake_engine_process import FakeEngineSettings, fake_engine_thread
from loraplex.testing.fake_runner import FAKE_CAPACITY
from loraplex.testing.running_server import fetch, free_ports

CAPACITY = msgspec.structs.replace(FAKE_CAPACITY, vocab_size=1024)
LONG = {"model": "m", "prompt": "x", "max_tokens": 1000, "ignore_eos": True}


class Running:
    """A Server in the test's own loop. What it said is in `lines`."""

    def __init__(self, config: Config, launch: EngineLauncher) -> None:
        self.lines: list[str] = []
        self.config = config
        self.server = Server(config, launch, self.lines.append)
        self.task = asyncio.create_task(self.server.run())

    async def until_ready(self) -> None:
        async with asyncio.timeout(20):
            while not self.lines:
                if self.task.done():
                    await self.task
                await asyncio.sleep(0.005)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(fetch, self.url(path))

    async def complete(self, **body) -> tuple[int, dict]:
        data = json.dumps(LONG | body).encode()
        status, text = await asyncio.to_thread(fetch, self.url("/v1/completions"), data)
        return status, json.loads(text)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.config.server.http_port}{path}"

    def signal(self) -> None:
        self.server._on_signal()

    async def ended(self) -> None:
        async with asyncio.timeout(20):
            await self.task


@pytest.fixture
async def run(tmp_path):
    """A function (engine settings, **server settings) -> Running; all are stopped at the end."""
    servers: list[Running] = []

    def start(settings: FakeEngineSettings | None = None, **fields) -> Running:
        settings = msgspec.structs.replace(settings or FakeEngineSettings(), capacity=CAPACITY)
        http_port, grpc_port, metrics_port = free_ports(3)
        ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        config = Config(
            server=ServerConfig(**(ports | {"state_dir": str(tmp_path)} | fields)),
            models={"m": ModelConfig(path=str(BASE_PATH))},
        )
        servers.append(Running(config, lambda model: fake_engine_thread(settings)))
        return servers[-1]

    yield start
    for server in servers:
        server.signal()
        server.signal()
        with contextlib.suppress(ConfigError):
            await server.ended()


async def test_it_says_where_and_serves(run):
    server = run()
    await server.until_ready()
    ports = server.config.server
    assert server.lines == [
        f"Started GRPCInferenceService at 127.0.0.1:{ports.grpc_port}",
        f"Started HTTPService at 127.0.0.1:{ports.http_port}",
        f"Started Metrics Service at 127.0.0.1:{ports.metrics_port}",
    ]
    assert (await server.get("/health/ready"))[0] == 200
    assert (await server.get("/v2/health/ready"))[0] == 200
    status, body = await server.complete(max_tokens=3)
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    server.signal()
    await server.ended()
    with socket.create_server(("127.0.0.1", ports.http_port)):
        pass


async def test_the_ports_answer_while_the_engine_starts(run):
    server = run(FakeEngineSettings(start_seconds=0.5))
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(OSError):
                assert (await server.get("/health/ready"))[0] == 503
                break
    assert (await server.get("/health/live"))[0] == 200
    assert (await server.complete())[0] == 503
    assert server.lines == []
    await server.until_ready()
    assert (await server.get("/health/ready"))[0] == 200


async def test_a_stop_while_it_starts(run):
    server = run(FakeEngineSettings(start_seconds=0.2))
    await asyncio.sleep(0.05)
    server.signal()
    await server.ended()
    assert server.lines == []


async def test_an_engine_that_cannot_start_ends_it(run):
    server = run(FakeEngineSettings(failure=ConfigError("no weights").to_info()))
    with pytest.raises(ConfigError, match="no weights"):
        await server.ended()
    assert server.lines == []


async def running_completion(server: Running, **body) -> "asyncio.Task[tuple[int, dict]]":
    await server.until_ready()
    completion = asyncio.create_task(server.complete(**body))
    async with asyncio.timeout(20):
        while '"step_id"' not in (await server.get("/v1/iterations"))[1]:
            pass
    return completion


async def test_a_stop_lets_requests_end(run):
    server = run(FakeEngineSettings(step_seconds=0.005))
    completion = await running_completion(server, max_tokens=60)
    server.signal()
    await server.ended()
    status, body = await completion
    assert (status, body["usage"]["completion_tokens"]) == (200, 60)


async def test_requests_that_take_too_long_are_told(run, caplog):
    server = run(FakeEngineSettings(step_seconds=0.05), shutdown_seconds=0.1)
    completion = await running_completion(server)
    server.signal()
    await server.ended()
    status, body = await completion
    assert (status, body["error"]["code"]) == (503, "not_ready")
    assert "the time to drain is up" in caplog.text


async def test_a_second_signal_waits_for_nobody(run):
    server = run(FakeEngineSettings(step_seconds=0.05), shutdown_seconds=600)
    completion = await running_completion(server)
    server.signal()
    await asyncio.sleep(0.05)
    assert not server.task.done()
    server.signal()
    await server.ended()
    assert (await completion)[0] == 503


@pytest.mark.parametrize("port", ["http_port", "metrics_port", "grpc_port"])
async def test_a_port_in_use_is_named(run, port):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        server = run(**{port: number})
        with pytest.raises(ConfigError, match=f"127.0.0.1:{number}") as caught:
            await server.ended()
    assert "\n" not in caught.value.message
    assert server.lines == []


def test_an_address_that_is_not_ours():
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0: "):
        bind("203.0.113.1", 0)
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


class TestUnless:
    async def test_work_that_is_done(self):
        assert await unless(asyncio.Event(), asyncio.sleep(0))

    async def test_work_that_is_overtaken(self):
        event = asyncio.Event()
        ended = []

        async def work():
            try:
                event.set()
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        assert not await unless(event, work())
        assert ended == [True]

    async def test_work_that_fails(self):
        async def work():
            raise ConfigError("no")

        with pytest.raises(ConfigError, match="no"):
            await unless(asyncio.Event(), work())

    async def test_no_task_is_left_when_it_is_cancelled_itself(self):
        before = asyncio.all_tasks()
        task = asyncio.create_task(unless(asyncio.Event(), asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == before
