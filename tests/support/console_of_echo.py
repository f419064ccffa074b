"""The console before an EchoService, for lists that are too long to be loaded."""

import contextlib
from collections.abc import Iterator, Sequence

from starlette.applications import Starlette

from loraplex.core.errors import NotReadyError
from loraplex.frontends.console.routes import console_routes
from loraplex.frontends.openai.app import openai_fallback_routes, openai_routes
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.stats import ServerReport
from support.echo_service import EchoService
from support.served import served


@contextlib.contextmanager
def console_of_echo(names: Sequence[str]) -> Iterator[tuple[EchoService, str]]:
    """Serve the console with adapters of these names; gives the backend and the URL."""
    backend = EchoService()
    for name in names:
        backend.register(name)
    app = Starlette()
    app.routes.extend(
        [
            *console_routes(),
            *openai_routes(backend),
            *health_routes(backend, _no_report),
            *openai_fallback_routes(),
        ]
    )
    with served(app) as url:
        yield backend, url


async def _no_report(models: list[str]) -> ServerReport:
    raise NotReadyError("this server makes no report")
