"""App of the HTTP port: the routes of all front ends, their guards, and the OpenAPI document."""

import asyncio
import functools
from collections.abc import Awaitable, Iterator, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.app.access import OPEN_PATHS, guarded, refusals, served_as_known_hosts
from loraplex.app.reporting import Reporting
from loraplex.core.config import Config
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate
from loraplex.frontends.body_limits import BodyMemory, JsonLimits
from loraplex.frontends.console import routes as console
from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.middleware import PathRouter, RecordedRoute, RequestMiddleware
from loraplex.frontends.openai.app import (
    openai_fallback_routes,
    openai_routes,
    refused_method,
    refused_route,
)
from loraplex.frontends.openai.context import OPENAI, ApiDialect, OpenAIOptions, StoreLimits
from loraplex.frontends.openapi.document import document
from loraplex.frontends.openapi.operation import described, json_of
from loraplex.frontends.ops.drain import drain_routes
from loraplex.frontends.ops.frontend_numbers import OtherFrontends
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.history import History, history_route
from loraplex.frontends.ops.latencies import Latencies
from loraplex.frontends.ops.metrics import described_metrics
from loraplex.frontends.ops.processes import processes_route
from loraplex.frontends.ops.requests import RequestEndpoint
from loraplex.frontends.ops.responses import responding_to_errors
from loraplex.frontends.ops.settings import settings_route
from loraplex.frontends.ops.stats import ServerStats
from loraplex.serving.backend import Backend
from loraplex.serving.draining import Draining
from loraplex.serving.response_memory import ResponseMemory

DOCUMENT_PATH = "/openapi.json"


def http_app(
    backend: Backend,
    draining: Draining,
    triton: TritonService,
    config: Config,
    authenticate: Authenticate,
    reporting: Reporting,
    *,
    metrics: ASGIApp,
    history: History,
    latencies: Latencies,
    bodies: BodyMemory,
    responses: ResponseMemory,
    dialect: ApiDialect = OPENAI,
    has_keys: bool = False,
    others: OtherFrontends | None = None,
) -> ASGIApp:
    """Return the app with the OpenAI, KServe and operators' routes.

    metrics: the app of the metrics port, also served here because vLLM's scrapers expect it here.
    history: what the models did, which is recorded alongside.
    bodies, responses: memory of the bodies of clients whose keys are valid, and of responses.
    has_keys: authenticate requires API keys. others: the other front-end processes.
    """
    settings = config.server
    openai = openai_routes(
        backend, openai_options(settings, dialect, has_keys=has_keys), authenticate
    )
    kserve = kserve_routes(
        triton,
        authenticate=authenticate,
        max_body_bytes=settings.max_body_bytes,
        json_limits=JsonLimits.of(settings),
    )
    routes = [
        *_health_routes(backend, draining, authenticate, reporting, latencies),
        *_report_routes(backend, config, authenticate, reporting, others or OtherFrontends()),
        history_route(backend, history, authenticate),
        RecordedRoute("/metrics", described_metrics(metrics), methods=["GET"]),
    ]
    open_paths = () if settings.health_needs_key else OPEN_PATHS
    routes.append(_document_route([*openai, *kserve, *routes], open_paths, has_keys=has_keys))
    pages = console.console_routes() if settings.has_console(has_keys=has_keys) else []
    # What is left to the app: few requests, and paths with a slash too many, which it redirects.
    # KServe's last route takes what is left of /v2, where Cohere has routes, too.
    router = PathRouter([*pages, *openai, *kserve], _app(pages, openai, routes))
    behind = guarded(router, authenticate, settings, [page.path for page in pages])
    return RequestMiddleware(
        served_as_known_hosts(behind, settings, has_keys=has_keys),
        reporting.telemetry,
        bodies,
        responses,
        refusals(settings),
        is_draining=lambda: draining.is_active,
    )


def _app(
    pages: Sequence[RecordedRoute], openai: Sequence[RecordedRoute], routes: list[RecordedRoute]
) -> Starlette:
    return Starlette(
        routes=[
            *pages,
            *openai,
            *routes,
            *_other_methods([*pages, *routes]),
            *openai_fallback_routes(),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )


def _health_routes(
    backend: Backend,
    draining: Draining,
    authenticate: Authenticate,
    reporting: Reporting,
    latencies: Latencies,
) -> list[RecordedRoute]:
    """Return the routes of health, statistics and draining."""
    stats = ServerStats(
        backend,
        reporting.telemetry,
        draining,
        reporting.connections,
        latencies,
        reporting.access_log,
    )
    return [
        *health_routes(backend, stats.report, authenticate),
        *drain_routes(draining, authenticate),
    ]


def _report_routes(
    backend: Backend,
    config: Config,
    authenticate: Authenticate,
    reporting: Reporting,
    others: OtherFrontends,
) -> list[RecordedRoute]:
    """Return the routes of requests, settings and processes."""
    requests = RequestEndpoint(reporting.telemetry, reporting.recent, authenticate, others)
    return [
        requests.route(),
        settings_route(backend, config, authenticate),
        processes_route(backend, authenticate, others),
    ]


def _other_methods(routes: Sequence[RecordedRoute]) -> Iterator[RecordedRoute]:
    """Yield routes that respond 405, where the fallback of /v1 would respond 404."""
    taken: dict[str, set[str]] = {}
    for route in routes:
        if route.methods:
            taken.setdefault(route.path, set()).update(route.methods)
    for path, methods in taken.items():
        # An app, no function: its route takes every method.
        yield RecordedRoute(
            path, _MethodRefusal(", ".join(sorted(methods))), include_in_schema=False
        )


class _MethodRefusal:
    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return refused_method(Request(scope), self._allowed)(scope, receive, send)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Respond 404 or 405 in OpenAI's format. KServe's paths never get here."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        assert error.headers is not None
        return refused_method(request, error.headers["Allow"])
    return refused_route(request)


def openai_options(settings: ServerConfig, dialect: ApiDialect, *, has_keys: bool) -> OpenAIOptions:
    return OpenAIOptions(
        json=JsonLimits.of(settings),
        dialect=dialect,
        stored_responses=StoreLimits(
            max_responses=settings.max_stored_responses,
            max_bytes=settings.stored_responses_bytes,
            max_seconds=settings.stored_responses_seconds,
        ),
        has_keys=has_keys,
        ignores_unknown=settings.unknown_fields == "ignore",
    )


def _document_route(
    routes: Sequence[BaseRoute], open_paths: Sequence[str], *, has_keys: bool
) -> RecordedRoute:
    """Return the document's route.

    The first request makes it, so that no start waits for it, and in a thread, because it takes
    seconds.
    """
    making = asyncio.Lock()

    @functools.cache
    def content() -> bytes:
        whole = document([*routes, route], has_keys=has_keys, open_paths=open_paths)
        return msgspec.json.format(msgspec.json.encode(whole))

    @described(json_of({"type": "object"}), tag="operations")
    async def serve_document(request: Request) -> Response:
        """This document."""
        del request
        async with making:
            text = await asyncio.to_thread(content)
        return Response(text, media_type="application/json")

    route = RecordedRoute(DOCUMENT_PATH, responding_to_errors(serve_document), methods=["GET"])
    return route
