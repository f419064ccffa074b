"""The serving process: its front ends on their ports, from start to drained stop.

Only this file, app.front_ends, app.engine and app.builder know the concrete classes.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp

from loraplex.app.access import served_as_known_hosts
from loraplex.app.dialects import dialect_of
from loraplex.app.front_ends import FrontEnds, front_ends
from loraplex.app.frontend_processes import FrontendProcesses, check_frontends, share_of
from loraplex.app.http_server import serving_http
from loraplex.app.reporting import Reporting
from loraplex.app.serving_process import bind
from loraplex.app.status_log import banner, logging_drain, logging_progress, logging_throughput
from loraplex.app.tls import Certificates, certificates
from loraplex.core.config import Config
from loraplex.core.counts import counted
from loraplex.core.server_config import ServerConfig
from loraplex.core.stats import EngineStats
from loraplex.frontends.access import Authenticate
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.grpc.server import GrpcLimits, GrpcServer
from loraplex.frontends.kserve.models.model_control import ModelControl
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.frontends.kserve.request_socket import serving_socket
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.ops.frontend_numbers import OtherFrontends
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.draining import Draining
from loraplex.serving.engines.link import EngineLauncher
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.service import Service

logger = logging.getLogger(__name__)


_READ_BYTES = 4096


def end_of_input(then: Callable[[], None]) -> None:
    """Call a function on the running loop once standard input has ended. The input is dropped."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, _READ_BYTES):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(then)

    threading.Thread(target=wait, name="end-of-input", daemon=True).start()


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


class Server:
    """One run of the serving process."""

    def __init__(
        self,
        config: Config,
        launch: EngineLauncher,
        print_line: Callable[[str], None],
        declarations: Sequence[ModelDeclaration] = (),
        control: ModelControl | None = None,
        given_keys: Sequence[str] = (),
    ) -> None:
        """Prepare a server; config has local paths.

        print_line: called with each address once the server is ready. declarations: the Triton
        models of a model repository; none: the default names. control: which of them are loaded;
        None: all. given_keys: API keys in addition to the configured ones.
        """
        self._declarations = declarations
        self._control = control
        self._config = config
        self._launch = launch
        self._print_line = print_line
        self._given_keys = given_keys
        self.bound_ports: Mapping[str, int] = {}
        """Numbers of the open ports: http, grpc, metrics; 0 in the settings: any free one."""
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._draining: Draining | None = None
        """Admission of the running service."""
        self._stop_deadline = 0.0
        """Value of time.monotonic(), once the server stops."""

    async def run(self) -> None:
        config = self._own_config()
        settings, tls = config.server, certificates(config.server)
        shown = OtherFrontends() if settings.frontend_processes > 1 else None
        composed = front_ends(
            config, self._launch, self._declarations, self._control, self._given_keys, shown
        )
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(composed)
            service, has_keys = served.service, served.keys is not None
            self._draining = service.draining
            others = None
            if shown is not None:
                others = FrontendProcesses(service, config, self._given_keys, shown)
            self._handle_signals(served.reporting, served.keys, others)
            if tls is not None:
                await stack.enter_async_context(tls.following())
            # The ports open first: /health/ready is false until the models are loaded. Where it is
            # always true they open last, as llgtrt's port does.
            opens_last = dialect_of(config).is_ready_at_once
            ports = Ports(stack, settings, tls, self._seconds_left)
            self.bound_ports = ports.bound
            async with logging_progress():
                is_started = not opens_last or await done_before(self._stop, served.start())
                if is_started:
                    await self._open(ports, served, has_keys=has_keys)
                    if others is not None:
                        running = others.running(
                            served.app, ports.bound["http"], self._seconds_left
                        )
                        await stack.enter_async_context(running)
                    work = _started(None if opens_last else served, others)
                    is_started = await done_before(self._stop, work)
            if is_started:
                for line in ports.lines():
                    self._print_line(line)
                self._log_ready(service, has_keys=has_keys)
                async with logging_throughput(functools.partial(_stats, service)):
                    await self._stop.wait()
                await self._drain(service)

    async def _open(self, ports: Ports, served: FrontEnds, *, has_keys: bool) -> None:
        await ports.open_http(served.app, served.reporting.connections)
        await ports.open_metrics(
            served_as_known_hosts(served.metrics, self._config.server, has_keys=has_keys)
        )
        await ports.open_grpc(
            *(served.triton, served.authenticate, served.reporting),
            *(served.bodies, served.service.responses),
        )
        await ports.open_request_socket(served.triton, served.reporting)

    def _log_ready(self, service: Service, *, has_keys: bool) -> None:
        settings = self._config.server
        served = [service.model(card.name) for card in service.models()]
        logger.info("%s", banner(served, settings, self.bound_ports, has_keys=has_keys))
        if not has_keys:
            logger.info(
                "no API keys: every client that reaches %s may use the server", settings.host
            )

    def _own_config(self) -> Config:
        """Return the configuration of this process. Raises ConfigError."""
        settings, control = self._config.server, self._control
        may_add_models = control is not None and control.discover is not None
        check_frontends(settings, may_add_models=may_add_models)
        return msgspec.structs.replace(self._config, server=share_of(settings))

    async def _drain(self, service: Service) -> None:
        seconds = self._config.server.shutdown_seconds
        self._stop_deadline = time.monotonic() + seconds
        async with logging_drain(service.draining.report):
            is_drained = await done_before(self._hurry, service.drain(seconds))
        if not is_drained:
            logger.warning("stopping at once: running requests end with an error")
        # Before the ports close: the remaining requests receive an error, and their connections
        # end.
        await service.close()

    def _handle_signals(
        self, reporting: Reporting, keys: ApiKeys | None, others: FrontendProcesses | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

        def on_hangup() -> None:
            if reporting.access_log is not None:
                reporting.access_log.reopen()
            if keys is not None:
                loop.run_in_executor(None, keys.refresh)
            if others is not None:
                others.refresh()

        if reporting.access_log is not None or keys is not None:
            loop.add_signal_handler(signal.SIGHUP, on_hangup)
        if self._config.server.stop_with_stdin:
            end_of_input(self._begin_stop)

    def _seconds_left(self) -> float:
        """Return the rest of the grace period, for clients that still read a response."""
        return 0.0 if self._hurry.is_set() else self._stop_deadline - time.monotonic()

    def _on_signal(self, number: int) -> None:
        """Stop at the first signal; at the second, do not wait for running requests."""
        if self._stop.is_set():
            self._hurry.set()
        elif number == signal.SIGINT:
            self._log_interrupt()
        else:
            logger.info(
                "stopping: running requests have %g s; a second signal ends them at once",
                self._config.server.shutdown_seconds,
            )
        self._begin_stop()

    def _log_interrupt(self) -> None:
        """Report to the user who pressed Ctrl-C what the server waits for, at any log level."""
        num_running = 0 if self._draining is None else self._draining.num_in_flight
        if num_running:
            logger.warning(
                "stopping: %s at most %g s to end; press Ctrl-C again to stop at once",
                counted(num_running, "request has", "requests have"),
                self._config.server.shutdown_seconds,
            )
        else:
            logger.info("stopping: no request is running")

    def _begin_stop(self) -> None:
        # At once, so that no probe finds it ready: under load, what waits for the event runs some
        # turns of the event loop later.
        if self._draining is not None:
            self._draining.close()
        self._stop.set()


def _stats(service: Service) -> dict[str, EngineStats]:
    return {card.name: service.model(card.name).stats for card in service.models()}


async def _started(served: FrontEnds | None, others: FrontendProcesses | None) -> None:
    """Start what is not yet started, and wait for the other processes."""
    if served is not None:
        await served.start()
    if others is not None:
        await others.until_open()


async def done_before(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do work until it ends or the event is set, which cancels it; return whether it ended."""
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
