"""An EchoBackend served over real sockets, and a small workload."""

from collections.abc import Iterator

import msgspec
import pytest
from starlette.applications import Starlette

from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from loraplex.testing.echo_backend import EchoBackend
from support.bench_workload import WORKLOAD, backend_of_workload
from support.served import served


@pytest.fixture
def workload():
    """A function (**changes) -> Workload."""
    return lambda **changes: msgspec.structs.replace(WORKLOAD, **changes)


@pytest.fixture
def backend() -> EchoBackend:
    return backend_of_workload()


@pytest.fixture
def url(backend: EchoBackend) -> Iterator[str]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url:
        yield url
