"""Routes for operators: is it alive, is it ready, what do its engines do.

Live means that the process serves: restart it if not. Ready means that every model would answer a
request now: send no traffic if not.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.core.errors import (
    CapacityError,
    LoraplexError,
    ModelNotFoundError,
    RequestError,
)
from loraplex.frontends.ops.iterations import iterations_answer
from loraplex.frontends.ops.memory import memory_report
from loraplex.serving.backend import Backend

_STATUSES: tuple[tuple[type[LoraplexError], int], ...] = (
    (ModelNotFoundError, 404),
    (RequestError, 400),
    (CapacityError, 503),
    (LoraplexError, 500),
)
"""The first class that fits counts."""

_Handler = Callable[[Request], Awaitable[Response]]


def health_routes(backend: Backend) -> list[Route]:
    """GET /health/live, /health/ready, /v1/iterations, /v1/memory and /v1/internal/stats."""
    endpoints = _Endpoints(backend)
    handlers: tuple[tuple[str, _Handler], ...] = (
        ("/health/live", endpoints.live),
        ("/health/ready", endpoints.ready),
        ("/v1/iterations", endpoints.iterations),
        ("/v1/memory", endpoints.memory),
        ("/v1/internal/stats", endpoints.stats),
    )
    return [Route(path, _answers_errors(handler), methods=["GET"]) for path, handler in handlers]


class _Endpoints:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def live(self, request: Request) -> Response:
        del request
        live = self._backend.health().live
        return _json({"live": live}, 200 if live else 503)

    async def ready(self, request: Request) -> Response:
        """503 with the reason while it starts, drains, or waits for an engine."""
        del request
        health = self._backend.health()
        body = {"ready": health.ready, "reason": health.reason}
        return _json(body, 200 if health.ready else 503)

    async def iterations(self, request: Request) -> Response:
        """The newest steps of a model, oldest first. `model`: the default one if not given."""
        return iterations_answer(self._backend, self._model(request), request)

    async def stats(self, request: Request) -> Response:
        """The engines' numbers by model; of one model if the query names it."""
        return _json({name: self._backend.stats(name) for name in self._models(request)})

    async def memory(self, request: Request) -> Response:
        """What lies where, by model; of one model if the query names it."""
        return _json(await memory_report(self._backend, self._models(request)))

    def _models(self, request: Request) -> list[str]:
        if "model" in request.query_params:
            return [self._model(request)]
        return [card.name for card in self._backend.models()]

    def _model(self, request: Request) -> str:
        name = request.query_params.get("model")
        return self._backend.models()[0].name if name is None else self._backend.model(name).name


def _answers_errors(handler: _Handler) -> _Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except LoraplexError as error:
            status = next(status for cls, status in _STATUSES if isinstance(error, cls))
            return _json({"error": error.to_info()}, status)

    return answer


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
