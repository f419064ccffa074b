"""The Triton front ends over a Backend, on free loopback ports, for tests of their clients."""

import asyncio
import dataclasses
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import uvicorn

from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.kserve.grpc.server import GrpcServer
from loraplex.frontends.kserve.http.router import PathRouter
from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.models.declaration import ModelDeclaration
from loraplex.frontends.kserve.models.model_control import ModelControl
from loraplex.frontends.kserve.service import TritonService
from loraplex.serving.backend import Backend

START_TIMEOUT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class ServedTriton:
    """Addresses as `host:port`, as tritonclient takes them."""

    http: str
    grpc: str
    service: TritonService


@contextmanager
def served_triton(
    backend: Backend,
    *,
    authenticate: Authenticate = everyone_is_local,
    max_body_bytes: int = 2**20,
    declarations: Sequence[ModelDeclaration] = (),
    control: ModelControl | None = None,
) -> Iterator[ServedTriton]:
    """Serve backend over HTTP and gRPC; its event loop runs in a thread of its own."""
    service = TritonService(backend, declarations=declarations, control=control)
    started: Future[ServedTriton] = Future()
    stop = threading.Event()

    async def serve() -> None:
        routes = kserve_routes(service, authenticate=authenticate, max_body_bytes=max_body_bytes)
        app = PathRouter(routes)
        config = uvicorn.Config(
            app, interface="asgi3", log_level="warning", lifespan="off", ws="none"
        )
        listener = socket.create_server(("127.0.0.1", 0))
        http = uvicorn.Server(config)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        grpc = GrpcServer(service, "127.0.0.1", 0, authenticate=authenticate)
        await grpc.start()
        http_address = f"127.0.0.1:{listener.getsockname()[1]}"
        started.set_result(ServedTriton(http_address, f"127.0.0.1:{grpc.port}", service))
        await asyncio.to_thread(stop.wait)
        await grpc.stop(grace_seconds=0.0)
        http.should_exit = True
        await serving
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield started.result(START_TIMEOUT_SECONDS)
    finally:
        stop.set()
        thread.join()
