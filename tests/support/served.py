"""An ASGI app served over real sockets on a free loopback port, for tests of clients."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from anyio.from_thread import start_blocking_portal
from starlette.types import ASGIApp

from loraplex.app.serving_process import bind


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve app in a thread with an event loop of its own; gives `http://127.0.0.1:port`."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(app)) as address,
    ):
        yield f"http://{address}"


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve app in this event loop; gives `127.0.0.1:port`, where clients may connect at once."""
    config = uvicorn.Config(
        app, interface="asgi3", log_level="warning", lifespan="off", ws="none", access_log=False
    )
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        task.cancel()  # uvicorn's own end takes 0.2 s
        with suppress(asyncio.CancelledError):
            await task
        for connection in list(server.server_state.connections):
            connection.shutdown()
        listener.close()
