"""Routes for operators: is it alive, is it ready, what do its engines do.

Live means that the process serves: restart it if not. Ready means that every model would answer a
request now: send no traffic if not.
"""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.ops.answers import Handler, answers_errors, for_operators, json_answer
from loraplex.frontends.ops.iterations import iterations_answer
from loraplex.frontends.ops.memory import memory_report
from loraplex.frontends.telemetry.routes import ToldRoute
from loraplex.serving.backend import Backend

Report = Callable[[list[str]], Mapping[str, Any]]
"""From the names of models to what is told of the server and them."""


def health_routes(
    backend: Backend, stats: Report, authenticate: Authenticate = everyone_is_local
) -> list[ToldRoute]:
    """GET /health/live, /health/ready; for operators /v1/iterations, /v1/memory and
    /v1/internal/stats."""
    endpoints = _Endpoints(backend, stats)
    handlers: tuple[tuple[str, Handler], ...] = (
        ("/health/live", endpoints.live),
        ("/health/ready", endpoints.ready),
        ("/v1/iterations", for_operators(endpoints.iterations, authenticate)),
        ("/v1/memory", for_operators(endpoints.memory, authenticate)),
        ("/v1/internal/stats", for_operators(endpoints.stats, authenticate)),
    )
    return [ToldRoute(path, answers_errors(handler), methods=["GET"]) for path, handler in handlers]


class _Endpoints:
    def __init__(self, backend: Backend, stats: Report) -> None:
        self._backend = backend
        self._stats = stats

    async def live(self, request: Request) -> Response:
        del request
        live = self._backend.health().live
        return json_answer({"live": live}, 200 if live else 503)

    async def ready(self, request: Request) -> Response:
        """503 with the reason while it starts, drains, or waits for an engine."""
        del request
        health = self._backend.health()
        body = {"ready": health.ready, "reason": health.reason}
        return json_answer(body, 200 if health.ready else 503)

    async def iterations(self, request: Request) -> Response:
        """The newest steps of a model, oldest first. `model`: the default one if not given."""
        return iterations_answer(self._backend, self._model(request), request)

    async def stats(self, request: Request) -> Response:
        """The server's numbers, with the engines' of all models, or of one that the query names."""
        return json_answer(self._stats(self._models(request)))

    async def memory(self, request: Request) -> Response:
        """What lies where, by model; of one model if the query names it."""
        return json_answer(await memory_report(self._backend, self._models(request)))

    def _models(self, request: Request) -> list[str]:
        if "model" in request.query_params:
            return [self._model(request)]
        return [card.name for card in self._backend.models()]

    def _model(self, request: Request) -> str:
        name = request.query_params.get("model")
        return self._backend.models()[0].name if name is None else self._backend.model(name).name
