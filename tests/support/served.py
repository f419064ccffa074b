"""An ASGI app served over real sockets on a free loopback port, for tests of clients."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

START_TIMEOUT_SECONDS = 10.0


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve app in a thread with an event loop of its own; gives `http://127.0.0.1:port`."""
    config = uvicorn.Config(
        app, interface="asgi3", log_level="warning", lifespan="off", ws="none", access_log=False
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        _wait_until_started(server, thread)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the server did not start; see its log")
        time.sleep(0.005)
