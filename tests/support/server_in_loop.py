"""A whole serving process, on fake engines and free ports, in a test's own event loop."""

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from loraplex.app.server import Server
from loraplex.core.config import Config, ModelConfig
from loraplex.core.plan import PageGeometry
from loraplex.core.server_config import ServerConfig
from loraplex.demo import BASE_PATH
from loraplex.serving.engines.link import EngineLauncher
from loraplex.testing.running_server import fetch
from support.fake_engine_process import FakeEngineSettings, fake_engine_thread
from support.fake_runner import FAKE_CAPACITY

CAPACITY = msgspec.structs.replace(
    FAKE_CAPACITY, vocab_size=1024, page_geometry=PageGeometry(slot_elements=8, slots_per_page=8192)
)
LONG = {"model": "m", "prompt": "x", "max_tokens": 1000, "ignore_eos": True}


class ServerInLoop:
    """A Server that runs as a task. What it said is in `lines`."""

    def __init__(self, config: Config, launch: EngineLauncher) -> None:
        self.lines: list[str] = []
        self.config = config
        self.server = Server(config, launch, self.lines.append)
        self.task = asyncio.create_task(self.server.run())

    @classmethod
    def start(
        cls,
        state_dir: Path,
        settings: FakeEngineSettings | None = None,
        *,
        model: Mapping[str, Any] = MappingProxyType({}),
        **fields: Any,
    ) -> "ServerInLoop":
        """fields: of ServerConfig. There is one model, `m`, with the shipped model's tokenizer;
        model: more of its settings.
        """
        settings = msgspec.structs.replace(settings or FakeEngineSettings(), capacity=CAPACITY)
        defaults: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        # A test reads the metrics of what it has just done.
        defaults |= {"state_dir": str(state_dir), "metrics_cache_seconds": 0.0}
        config = Config(
            server=ServerConfig(**(defaults | fields)),
            models={"m": ModelConfig(path=str(BASE_PATH), **{"device": "cpu", **model})},
        )
        return cls(config, lambda _: fake_engine_thread(settings))

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while not self.lines:
                if self.task.done():
                    await self.task
                await asyncio.sleep(0.005)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(self._fetch, path)

    async def complete(self, **body: Any) -> tuple[int, Any]:
        data = json.dumps(LONG | body).encode()
        status, text = await asyncio.to_thread(self._fetch, "/v1/completions", data)
        return status, json.loads(text)

    async def running_completion(self, **body: Any) -> "asyncio.Task[tuple[int, Any]]":
        """One that an engine has begun."""
        await self.until_ready()
        completion = asyncio.create_task(self.complete(**body))
        async with asyncio.timeout(60):
            while '"step_id"' not in (await self.get("/v1/iterations"))[1]:
                pass
        return completion

    def port(self, kind: str = "http") -> int:
        """Return an open port: http, grpc or metrics. Raises OSError before it is open."""
        number: int | None = self.server.bound_ports.get(kind)
        if number is None:
            raise ConnectionRefusedError(f"the {kind} port is not open yet")
        return number

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port()}{path}"

    def _fetch(self, path: str, data: bytes | None = None) -> tuple[int, str]:
        """Send a request from another thread, so that the server's loop goes on meanwhile."""
        return fetch(self.url(path), data)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.server._on_signal(number)

    async def ended(self) -> None:
        async with asyncio.timeout(60):
            await self.task
