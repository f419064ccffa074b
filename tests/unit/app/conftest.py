"""A serving process for a test, on the loop that it has."""

import contextlib

import pytest

from loraplex.app.serving_process import new_event_loop
from loraplex.core.errors import ConfigError
from support.fake_engine_process import FakeEngineSettings
from support.kept_staging import keeping_staging_processes
from support.server_in_loop import ServerInLoop


@pytest.fixture(autouse=True, scope="module")
def _shared_staging():
    with keeping_staging_processes():
        yield


def pytest_asyncio_loop_factories(config, item):
    del config
    return {"serving": getattr(item.module, "new_event_loop", new_event_loop)}


@pytest.fixture
async def run(tmp_path):
    """A function (engine settings, **server settings) -> ServerInLoop; all stop at the end."""
    servers: list[ServerInLoop] = []

    def start(settings: FakeEngineSettings | None = None, **fields) -> ServerInLoop:
        servers.append(ServerInLoop.start(tmp_path, settings, **fields))
        return servers[-1]

    yield start
    for server in servers:
        server.signal()
        server.signal()
        with contextlib.suppress(ConfigError):
            await server.ended()
