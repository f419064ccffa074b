"""The Triton front ends over a Backend, on free loopback ports, for tests of their clients."""

import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from anyio.from_thread import start_blocking_portal

from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.kserve.grpc.server import GrpcServer
from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.models.model_control import ModelControl
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.middleware import PathRouter
from loraplex.serving.backend import Backend
from support.served import serving


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

    @asynccontextmanager
    async def serving_both() -> AsyncIterator[ServedTriton]:
        service = TritonService(backend, declarations=declarations, control=control)
        routes = kserve_routes(service, authenticate=authenticate, max_body_bytes=max_body_bytes)
        grpc = GrpcServer(service, "127.0.0.1", 0, authenticate=authenticate)
        async with serving(PathRouter(routes)) as http:
            await grpc.start()
            yield ServedTriton(http, f"127.0.0.1:{grpc.port}", service)
            await grpc.stop(grace_seconds=0.0)

    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving_both()) as triton,
    ):
        yield triton
