"""Ports of the server, opened according to its settings."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from starlette.types import ASGIApp

from loraplex.app.http_server import serving_http
from loraplex.app.listener import bind
from loraplex.app.reporting import Reporting
from loraplex.app.tls import Certificates
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate
from loraplex.frontends.body_memory import BodyMemory
from loraplex.frontends.kserve.grpc.limits import GrpcLimits
from loraplex.frontends.kserve.grpc.server import GrpcServer
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.socket.server import serving_socket
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.serving.response_memory import ResponseMemory

_TITLES: Final = {
    "grpc": "GRPCInferenceService",
    "http": "HTTPService",
    "metrics": "Metrics Service",
}
"""Triton's names of the ports, in the order of its lines."""


class Ports:
    """Ports of the server; the stack that they are opened on closes them."""

    def __init__(
        self,
        stack: contextlib.AsyncExitStack,
        settings: ServerConfig,
        tls: Certificates | None,
        seconds_left: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create without open ports. seconds_left: as in serving_http."""
        self._is_shared = settings.frontend_processes > 1
        self._stack = stack
        self._settings = settings
        self._tls = tls
        self._seconds_left = seconds_left
        self.bound: dict[str, int] = {}
        """Numbers of the open ports: http, grpc, metrics. A setting of 0 lets the system choose."""

    async def open_http(self, app: ASGIApp, connections: HttpConnections) -> None:
        if not self._settings.http:
            return
        port = self._settings.http_port
        if self._is_shared:
            # Nothing else may listen there, not even what would share the port.
            bind(self._settings.host, port).close()
        self.bound["http"] = await self._opened(app, port, connections, is_shared=self._is_shared)

    async def open_metrics(self, app: ASGIApp) -> None:
        if self._settings.metrics:
            port = self._settings.metrics_port
            self.bound["metrics"] = await self._opened(app, port, HttpConnections())

    async def open_grpc(
        self,
        triton: TritonService,
        authenticate: Authenticate,
        reporting: Reporting,
        bodies: BodyMemory,
        responses: ResponseMemory,
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
            messages=bodies,
            responses=responses,
            tls=None if self._tls is None else self._tls.pair,
        )
        await server.start()
        self._stack.push_async_callback(server.stop)
        self.bound["grpc"] = server.port

    async def open_request_socket(self, triton: TritonService, reporting: Reporting) -> None:
        path = self._settings.request_socket
        if path:
            serving = serving_socket(
                triton,
                path,
                max_message_bytes=self._settings.max_body_bytes,
                unread_seconds=self._settings.body_timeout_seconds,
                telemetry=reporting.telemetry,
            )
            await self._stack.enter_async_context(serving)

    def lines(self) -> Iterator[str]:
        """Yield the lines that Triton prints when it is ready; scripts wait for them."""
        for kind, title in _TITLES.items():
            if kind in self.bound:
                yield f"Started {title} at {self._settings.host}:{self.bound[kind]}"

    async def _opened(
        self, app: ASGIApp, port: int, connections: HttpConnections, *, is_shared: bool = False
    ) -> int:
        serving = serving_http(
            app,
            self._settings,
            port,
            connections,
            self._tls,
            self._seconds_left,
            is_shared=is_shared,
        )
        return await self._stack.enter_async_context(serving)
