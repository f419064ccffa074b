"""An EchoService served over real sockets, and a small workload."""

from collections.abc import Iterator

import msgspec
import pytest
from starlette.applications import Starlette

from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.bench_workload import WORKLOAD, backend_of_workload
from support.echo_service import EchoService
from support.served import served


@pytest.fixture
def workload():
    """A function (**changes) -> Workload."""
    return lambda **changes: msgspec.structs.replace(WORKLOAD, **changes)


@pytest.fixture
def backend() -> EchoService:
    return backend_of_workload()


@pytest.fixture
def url(backend: EchoService) -> Iterator[str]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url:
        yield url
