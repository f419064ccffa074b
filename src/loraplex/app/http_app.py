"""The app of the HTTP port: every room's routes, behind the door, and the document of them."""

import functools
from collections.abc import Awaitable, Iterator, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.app.access import OPEN_PATHS, guarded
from loraplex.app.reporting import Reporting
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate
from loraplex.frontends.kserve.http.router import PathRouter
from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.openai.app import (
    openai_fallback_routes,
    openai_routes,
    refused_method,
    refused_route,
)
from loraplex.frontends.openai.context import OpenAIOptions
from loraplex.frontends.openai.dialect import OPENAI, Dialect
from loraplex.frontends.openai.responses_api.store import StoreLimits
from loraplex.frontends.openapi.document import document
from loraplex.frontends.openapi.operation import described, json_of
from loraplex.frontends.ops.answers import answers_errors
from loraplex.frontends.ops.drain import drain_routes
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.metrics import described_metrics
from loraplex.frontends.ops.stats import ServerStats
from loraplex.frontends.telemetry.http import RequestMiddleware
from loraplex.frontends.telemetry.routes import ToldRoute
from loraplex.serving.backend import Backend
from loraplex.serving.draining import Draining

DOCUMENT_PATH = "/openapi.json"
_KSERVE, _BELOW_KSERVE = "/v2", "/v2/"


def http_app(
    backend: Backend,
    draining: Draining,
    triton: TritonService,
    settings: ServerConfig,
    authenticate: Authenticate,
    reporting: Reporting,
    *,
    metrics: ASGIApp,
    dialect: Dialect = OPENAI,
    has_keys: bool = False,
) -> ASGIApp:
    """OpenAI, KServe and operations on one port, behind its door and told of.

    metrics: what the metrics port serves is here, too, where vLLM's scrapers look for it. has_keys:
    what authenticate asks for; told in the document.
    """
    openai = openai_routes(backend, _options(settings, dialect), authenticate)
    stats = ServerStats(
        backend,
        reporting.telemetry,
        draining,
        reporting.connections,
        reporting.access_log,
    )
    kserve = kserve_routes(
        triton, authenticate=authenticate, max_body_bytes=settings.max_body_bytes
    )
    routes = [
        *health_routes(backend, stats.report, authenticate),
        *drain_routes(draining, authenticate),
        ToldRoute("/metrics", described_metrics(metrics), methods=["GET"]),
    ]
    open_paths = () if settings.health_needs_key else OPEN_PATHS
    routes.append(_document_route([*openai, *kserve, *routes], open_paths, has_keys=has_keys))
    app = Starlette(
        routes=[*openai, *routes, *_other_methods(routes), *openai_fallback_routes()],
        exception_handlers={HTTPException: _no_such_route},
    )
    return RequestMiddleware(
        guarded(KServeFirst(PathRouter(kserve), app), authenticate, settings),
        reporting.telemetry,
        is_draining=lambda: draining.is_active,
    )


def _other_methods(routes: Sequence[ToldRoute]) -> Iterator[ToldRoute]:
    """405 where the fallback of /v1 would say that there is nothing."""
    taken: dict[str, set[str]] = {}
    for route in routes:
        if route.methods:
            taken.setdefault(route.path, set()).update(route.methods)
    for path, methods in taken.items():
        # An app, no function: its route takes every method.
        yield ToldRoute(path, _MethodRefusal(", ".join(sorted(methods))), include_in_schema=False)


class _MethodRefusal:
    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return refused_method(Request(scope), self._allowed)(scope, receive, send)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """404 and 405 of the framework, which never sees KServe's paths, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        assert error.headers is not None
        return refused_method(request, error.headers["Allow"])
    return refused_route(request)


class KServeFirst:
    """Its paths, which are all below one, go past the other rooms' routes and middleware: finding
    their way there took as long as answering them."""

    def __init__(self, kserve: ASGIApp, others: ASGIApp) -> None:
        self._kserve = kserve
        self._others = others

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path = scope.get("path", "")
        is_kserve = scope["type"] == "http" and (path.startswith(_BELOW_KSERVE) or path == _KSERVE)
        return (self._kserve if is_kserve else self._others)(scope, receive, send)


def _options(settings: ServerConfig, dialect: Dialect) -> OpenAIOptions:
    return OpenAIOptions(
        max_body_bytes=settings.max_body_bytes,
        dialect=dialect,
        stored_responses=StoreLimits(
            max_responses=settings.max_stored_responses,
            max_bytes=settings.stored_responses_bytes,
            max_seconds=settings.stored_responses_seconds,
        ),
    )


def _document_route(
    routes: Sequence[BaseRoute], open_paths: Sequence[str], *, has_keys: bool
) -> ToldRoute:
    """It is made when somebody asks for it first: no start waits for it."""

    @functools.cache
    def content() -> bytes:
        told = document([*routes, route], has_keys=has_keys, open_paths=open_paths)
        return msgspec.json.format(msgspec.json.encode(told))

    @described(json_of({"type": "object"}), tag="operations")
    async def answer(request: Request) -> Response:
        """This document."""
        del request
        return Response(content(), media_type="application/json")

    route = ToldRoute(DOCUMENT_PATH, answers_errors(answer), methods=["GET"])
    return route
