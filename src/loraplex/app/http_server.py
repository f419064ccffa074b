"""HTTP server of an app on one port: uvicorn, within the server's limits."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from loraplex.app.http_guard import ConnectionGuard, ConnectionLimits, GuardedApp
from loraplex.app.serving_process import bind
from loraplex.app.tls import Certificates
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.telemetry.connections import HttpConnections

_LINGER_SECONDS = 5
"""Time that connections have for their last bytes after everything else has stopped."""
_POLL_SECONDS = 0.1


class HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers: one process runs two of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving_http(
    app: ASGIApp,
    settings: ServerConfig,
    port: int,
    connections: HttpConnections,
    tls: Certificates | None = None,
    seconds_left: Callable[[], float] = lambda: 0.0,
    *,
    is_shared: bool = False,
) -> AsyncIterator[int]:
    """Serve an app while the context lasts, and yield the bound port. Raises ConfigError.

    seconds_left: called when the context ends; returns how long clients may still read their
    responses. They have at least _LINGER_SECONDS. is_shared: other processes serve the port, too.
    """
    listener = bind(settings.host, port, is_shared=is_shared)
    async with serving_listener(app, settings, listener, connections, tls, seconds_left):
        yield listener.getsockname()[1]


@contextlib.asynccontextmanager
async def serving_listener(
    app: ASGIApp,
    settings: ServerConfig,
    listener: socket.socket,
    connections: HttpConnections,
    tls: Certificates | None = None,
    seconds_left: Callable[[], float] = lambda: 0.0,
) -> AsyncIterator[None]:
    """Serve an app at a listening socket, which the end of the context closes."""
    guards: dict[ConnectionGuard, None] = {}
    server = HttpServer(_uvicorn_config(app, settings, connections, guards, tls))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        for guard in list(guards):
            guard.stop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LINGER_SECONDS
        while not task.done() and (loop.time() < deadline or seconds_left() > 0):
            await asyncio.wait([task], timeout=_POLL_SECONDS)
        for guard in list(guards):
            guard.transport.abort()
        await asyncio.wait([task], timeout=_LINGER_SECONDS)
        server.force_exit = True
        try:
            await task
        finally:
            listener.close()


def _uvicorn_config(
    app: ASGIApp,
    settings: ServerConfig,
    connections: HttpConnections,
    guards: dict[ConnectionGuard, None],
    tls: Certificates | None,
) -> uvicorn.Config:
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        max_headers=settings.max_headers,
        max_header_bytes=settings.max_header_bytes,
        max_request_line_bytes=settings.max_request_line_bytes,
        header_timeout_seconds=settings.header_timeout_seconds,
        body_timeout_seconds=settings.body_timeout_seconds,
    )
    if settings.trusted_proxies:
        # Inside the guarded app: uvicorn would look for the client's address in trailers, too.
        app = ProxyHeadersMiddleware(app, list(settings.trusted_proxies))  # type: ignore[arg-type, assignment]
    config = uvicorn.Config(
        GuardedApp(app),
        http="httptools",
        interface="asgi3",
        log_level="error",
        lifespan="off",
        ws="none",
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_seconds,  # type: ignore[arg-type]  # any number
        proxy_headers=False,
        ssl_certfile=tls.certificate if tls is not None else None,
        ssl_keyfile=tls.key if tls is not None else None,
    )
    config.load()
    if tls is not None and config.ssl is not None:
        tls.renew(config.ssl)
    config.http_protocol_class = functools.partial(  # type: ignore[assignment]
        ConnectionGuard, config.http_protocol_class, limits, connections, guards
    )
    return config
