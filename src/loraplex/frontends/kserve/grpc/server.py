"""The gRPC server: its own thread with its own event loop, started and stopped from another loop.

Nothing that a gRPC client does, or fails to do, can hold up the backend's loop.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from loraplex.core.errors import ConfigError
from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.kserve.grpc.access import KeyInterceptor
from loraplex.frontends.kserve.grpc.bridge import LoopBridge
from loraplex.frontends.kserve.grpc.health import health_handler
from loraplex.frontends.kserve.grpc.limits import NO_LIMITS, GrpcLimits
from loraplex.frontends.kserve.grpc.servicer import TritonServicer
from loraplex.frontends.kserve.grpc.telemetry import RequestInterceptor
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.telemetry.telemetry import Telemetry


class GrpcServer:
    """Serves `service`, whose backend lives on `loop`. One start, one stop."""

    def __init__(
        self,
        service: TritonService,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
        *,
        authenticate: Authenticate = everyone_is_local,
        health_is_open: bool = True,
        limits: GrpcLimits = NO_LIMITS,
        telemetry: Telemetry | None = None,
        tls: tuple[bytes, bytes] | None = None,
    ) -> None:
        """health_is_open: no key is asked for what load balancers ask. telemetry: of the whole
        server; None: one that nobody reads. tls: the key and the certificates, in PEM form; None:
        plain text."""
        self._interceptor = RequestInterceptor(telemetry or Telemetry())
        self._limits = limits
        self._door = KeyInterceptor(authenticate, health_is_open=health_is_open)
        self._tls = tls
        self._servicer = TritonServicer(service, LoopBridge(loop), authenticate)
        self._host = host
        self._port = port
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._server: grpc.aio.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The bound port; what was asked for (0 is any free one) before the start."""
        return self._port

    async def start(self) -> None:
        """Bind and serve. Raises ConfigError if the address cannot be bound."""
        own_loop = asyncio.new_event_loop()
        self._own_loop = own_loop
        self._thread = threading.Thread(
            target=_run_loop, args=(own_loop,), name="kserve-grpc", daemon=True
        )
        self._thread.start()
        try:
            await self._on_own_loop(self._bind())
        except BaseException:
            await self._end_thread()
            raise

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Take no more calls, let the running ones end for so long, then cancel them."""
        if self._server is not None:
            await self._on_own_loop(self._server.stop(grace_seconds))
            self._server = None
        await self._end_thread()

    async def _bind(self) -> None:
        server = grpc.aio.server(
            interceptors=(self._interceptor, self._door), options=self._limits.channel_arguments()
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self._servicer, server)
        server.add_generic_rpc_handlers((health_handler(self._servicer.is_ready),))
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self._port = self._add_port(server, f"{host}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(
                f"the gRPC server cannot listen on {host}:{self._port}: {error}"
            ) from None
        await server.start()
        self._server = server

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        if self._tls is None:
            return int(server.add_insecure_port(address))
        credentials = grpc.ssl_server_credentials([self._tls])
        return int(server.add_secure_port(address, credentials))

    async def _on_own_loop(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._own_loop is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._own_loop))

    async def _end_thread(self) -> None:
        if self._own_loop is not None and self._thread is not None:
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._own_loop = None
            self._thread = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run until stopped; then end what is left, so that no task outlives its loop."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
