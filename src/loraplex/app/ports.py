"""Ports of the server, opened according to its settings."""

import contextlib
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp

from loraplex.app.http_server import serving_http
from loraplex.app.reporting import Reporting
from loraplex.app.tls import TlsFiles
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate
from loraplex.frontends.kserve.grpc.limits import GrpcLimits
from loraplex.frontends.kserve.grpc.server import GrpcServer
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.socket.server import serving_socket
from loraplex.frontends.telemetry.connections import HttpConnections


class Ports:
    """Ports of the server; the stack that they are opened on closes them."""

    def __init__(
        self,
        stack: contextlib.AsyncExitStack,
        settings: ServerConfig,
        tls: TlsFiles | None,
        seconds_left: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create without open ports. seconds_left: as in serving_http."""
        self._stack = stack
        self._settings = settings
        self._tls = tls
        self._seconds_left = seconds_left
        self._lines: list[str] = []

    async def open_http(self, app: ASGIApp, connections: HttpConnections) -> None:
        if not self._settings.http:
            return
        port = await self._opened(app, self._settings.http_port, connections)
        self._lines.append(f"Started HTTPService at {self._settings.host}:{port}")

    async def open_metrics(self, app: ASGIApp) -> None:
        if self._settings.metrics:
            port = await self._opened(app, self._settings.metrics_port, HttpConnections())
            self._lines.append(f"Started Metrics Service at {self._settings.host}:{port}")

    async def open_grpc(
        self, triton: TritonService, authenticate: Authenticate, reporting: Reporting
    ) -> None:
        if not self._settings.grpc:
            return
        server = GrpcServer(
            triton,
            self._settings.host,
            self._settings.grpc_port,
            authenticate=authenticate,
            health_is_open=not self._settings.health_needs_key,
            limits=GrpcLimits.of(self._settings),
            telemetry=reporting.telemetry,
            tls=None if self._tls is None else self._tls.read(),
        )
        await server.start()
        self._stack.push_async_callback(server.stop)
        host = self._settings.host
        self._lines.insert(0, f"Started GRPCInferenceService at {host}:{server.port}")

    async def open_request_socket(self, triton: TritonService, reporting: Reporting) -> None:
        path, limit = self._settings.request_socket, self._settings.max_body_bytes
        if path:
            serving = serving_socket(
                triton, path, max_message_bytes=limit, telemetry=reporting.telemetry
            )
            await self._stack.enter_async_context(serving)

    def lines(self) -> Iterator[str]:
        """Yield the lines that Triton prints when it is ready; scripts wait for them."""
        yield from self._lines

    async def _opened(self, app: ASGIApp, port: int, connections: HttpConnections) -> int:
        return await self._stack.enter_async_context(
            serving_http(app, self._settings, port, connections, self._tls, self._seconds_left)
        )
