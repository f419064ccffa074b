"""The serving process: its front ends on their ports, from start to drained stop.

With app.engine and app.builder the only place that knows the concrete classes.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from loraplex.app.builder import build_service
from loraplex.app.launch import EngineLauncher
from loraplex.core.config import Config
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.core.version import __version__
from loraplex.frontends.kserve.grpc.server import GrpcServer
from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.model_control import ModelControl
from loraplex.frontends.kserve.models.declaration import ModelDeclaration
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.openai.app import openai_fallback_routes, openai_routes
from loraplex.frontends.openai.room import OpenAIOptions
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.metrics import metrics_app
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_LINGER_SECONDS = 5
"""How long connections may still take their last bytes after everything else has stopped."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: one server of ours runs two of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One run of the serving process."""

    def __init__(
        self,
        config: Config,
        launch: EngineLauncher,
        say: Callable[[str], None],
        declarations: Sequence[ModelDeclaration] = (),
        control: ModelControl | None = None,
    ) -> None:
        """A configuration with local paths. `say` is told the addresses once all is ready.

        declarations: of a model repository; none: the default names of the Triton models. control:
        which of them are loaded; None: all.
        """
        self._declarations = declarations
        self._control = control
        self._config = config
        self._launch = launch
        self._say = say
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        settings = self._config.server
        metrics = RequestMetrics(self._config.models)
        service = build_service(self._config, self._launch, metrics)
        triton = TritonService(service, declarations=self._declarations, control=self._control)
        grpc_server = GrpcServer(
            triton, asyncio.get_running_loop(), settings.host, settings.grpc_port
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(service.close)
            self._handle_signals()
            app = http_app(service, triton, settings)
            # The ports answer first: /health/ready says false until the models are there.
            http_port = await stack.enter_async_context(
                serving_http(app, settings.host, settings.http_port)
            )
            metrics_port = await stack.enter_async_context(
                serving_http(
                    metrics_app(service, metrics, triton.collectors()),
                    settings.host,
                    settings.metrics_port,
                )
            )
            await grpc_server.start()
            stack.push_async_callback(grpc_server.stop)
            if await unless(self._stop, service.start()):
                for line in started_lines(settings.host, grpc_server.port, http_port, metrics_port):
                    self._say(line)
                await self._stop.wait()
                logger.info("stopping: requests in work may end")
                await unless(self._hurry, service.drain(settings.shutdown_seconds))
                # Before the ports close: what is left is told, so that its connection ends.
                await service.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """The first asks for a stop, the second not to wait for requests in work."""
        (self._hurry if self._stop.is_set() else self._stop).set()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work was done before the event came; if not, it is cancelled."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


def http_app(service: Service, triton: TritonService, settings: ServerConfig) -> FastAPI:
    """OpenAI, KServe and operations on one port."""
    app = FastAPI(title="loraplex", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(
        openai_routes(service, OpenAIOptions(max_body_bytes=settings.max_body_bytes))
    )
    app.router.routes.extend(kserve_routes(triton, max_body_bytes=settings.max_body_bytes))
    app.router.routes.extend(health_routes(service))
    app.include_router(openai_fallback_routes())
    return app


@contextlib.asynccontextmanager
async def serving_http(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """Serve an app while the context lasts; gives the bound port."""
    listener = bind(host, port)
    server = HttpServer(
        uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            ws="none",
            access_log=False,
            timeout_graceful_shutdown=_LINGER_SECONDS,
        )
    )
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


def started_lines(host: str, grpc_port: int, http_port: int, metrics_port: int) -> Iterator[str]:
    """What Triton says when it is ready: scripts wait for these lines."""
    yield f"Started GRPCInferenceService at {host}:{grpc_port}"
    yield f"Started HTTPService at {host}:{http_port}"
    yield f"Started Metrics Service at {host}:{metrics_port}"


def bind(host: str, port: int) -> socket.socket:
    """Raises ConfigError that names the address."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = f"{os.strerror(error.errno)}; stop what listens there, or choose another port"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    # Accepted sockets inherit it. asyncio sets it only on sockets that name their protocol, and
    # without it the chunks of a stream wait for each other, some 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
