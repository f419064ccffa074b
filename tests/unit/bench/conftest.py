"""An EchoBackend served over real sockets, and a small workload."""

from collections.abc import Iterator

import msgspec
import pytest
from starlette.applications import Starlette

from loraplex.bench.arrivals import ClosedLoop
from loraplex.bench.popularity import Distinct
from loraplex.bench.workload import Lengths, Workload
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from loraplex.testing.echo_backend import EchoBackend
from support.served import served

WORKLOAD = Workload(
    num_requests=6,
    prompt_tokens=Lengths(4, 4),
    output_tokens=Lengths(5, 5),
    popularity=Distinct(),
    num_adapters=3,
    arrivals=ClosedLoop(2),
    seed=0,
)


@pytest.fixture
def workload():
    """A function (**changes) -> Workload."""
    return lambda **changes: msgspec.structs.replace(WORKLOAD, **changes)


@pytest.fixture
def backend() -> EchoBackend:
    """Serves `echo` with the adapters a0, a1, a2."""
    backend = EchoBackend()
    for index in range(3):
        backend.register(f"a{index}")
    return backend


@pytest.fixture
def url(backend: EchoBackend) -> Iterator[str]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url:
        yield url
