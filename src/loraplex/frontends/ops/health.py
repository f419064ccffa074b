"""Routes for operators: is it alive, is it ready, what do its engines do.

Live means that the process serves: restart it if not. Ready means that every model would serve a
request now: send no traffic if not.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.stats import StepRecord
from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openapi.operation import (
    JSON,
    OF_NAMES,
    Media,
    Parameter,
    ResponseDoc,
    described,
    json_of,
)
from loraplex.frontends.ops.responses import (
    Handler,
    for_operators,
    json_response,
    number,
    responding_to_errors,
)
from loraplex.frontends.ops.stats import ServerReport
from loraplex.serving.backend import Backend
from loraplex.serving.model_memory import ModelMemory, StoredAdapters

DEFAULT_ITERATIONS = 100
MAX_ITERATIONS = 10_000
_MAX_NS = 2**63 - 1
JSON_LINES = "application/x-ndjson"
LIMIT = Parameter(
    "limit",
    f"At most so many; {DEFAULT_ITERATIONS} if it is absent.",
    {"type": "integer", "minimum": 1, "maximum": MAX_ITERATIONS},
)
AFTER_NS = Parameter(
    "after_ns",
    "Only steps whose `start_ns` is greater, and of those the first; the body is then an object.",
    {"type": "integer", "minimum": 0, "maximum": _MAX_NS},
)


class LaterSteps(msgspec.Struct, frozen=True):
    """Steps that started after a time, and the time of the response."""

    now_ns: int
    """Time on the clock of `start_ns`, which has no fixed origin."""
    unix_ns: int
    """The same moment, in nanoseconds since 1970."""
    data: Sequence[StepRecord]
    """Oldest first; the `start_ns` of the last one is the `after_ns` of the next request."""


ITERATIONS = ResponseDoc(200, (Media(JSON, list[StepRecord] | LaterSteps), Media(JSON_LINES)))


def iterations_response(backend: Backend, model: str, request: Request) -> Response:
    """The newest steps of a model, oldest first.

    A JSON array, or JSON lines for a client that accepts them. `limit`: at most so many.
    `after_ns`: an object with the first steps that started later. Raises InvalidParameterError.
    """
    query = request.query_params
    limit = number(query.get("limit"), LIMIT)
    after_ns = number(query.get("after_ns"), AFTER_NS)
    records = backend.model(model).steps(DEFAULT_ITERATIONS if limit is None else limit, after_ns)
    if JSON_LINES in request.headers.get("accept", ""):
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        return Response(lines, media_type=JSON_LINES)
    body = records if after_ns is None else LaterSteps(time.monotonic_ns(), time.time_ns(), records)
    return Response(msgspec.json.encode(body), media_type=JSON)


Report = Callable[[list[str]], Awaitable[ServerReport]]
"""Function from the names of models to a report of the server and these models."""


class MemoryReport(ModelMemory, frozen=True, kw_only=True):
    store: StoredAdapters


def health_routes(
    backend: Backend, stats: Report, authenticate: Authenticate = everyone_is_local
) -> list[RecordedRoute]:
    """GET /health/live, /health/ready; for operators /v1/iterations, /v1/memory and
    /v1/internal/stats."""
    endpoints = _HealthEndpoints(backend, stats)
    handlers: tuple[tuple[str, Handler], ...] = (
        ("/health/live", endpoints.live),
        ("/health/ready", endpoints.ready),
        ("/v1/iterations", for_operators(endpoints.iterations, authenticate)),
        ("/v1/memory", for_operators(endpoints.memory, authenticate)),
        ("/v1/internal/stats", for_operators(endpoints.stats, authenticate)),
    )
    return [
        RecordedRoute(path, responding_to_errors(handler), methods=["GET"])
        for path, handler in handlers
    ]


class Liveness(msgspec.Struct, frozen=True):
    live: bool


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str


ONE_MODEL = Parameter("model", "A base model; absent: the default one.")
_MODEL = Parameter("model", "Only of this base model.")


class _HealthEndpoints:
    def __init__(self, backend: Backend, stats: Report) -> None:
        self._backend = backend
        self._stats = stats

    @described(json_of(Liveness), json_of(Liveness, 503), tag="health")
    async def live(self, request: Request) -> Response:
        """Whether the process serves."""
        del request
        live = self._backend.health().live
        return json_response(Liveness(live), 200 if live else 503)

    @described(json_of(Readiness), json_of(Readiness, 503), tag="health")
    async def ready(self, request: Request) -> Response:
        """Whether every model would serve a request, and if not, why."""
        del request
        health = self._backend.health()
        body = Readiness(health.ready, health.reason)
        return json_response(body, 200 if health.ready else 503)

    @described(
        ITERATIONS,
        tag="operations",
        query=(ONE_MODEL, LIMIT, AFTER_NS),
        errors=OF_NAMES,
    )
    async def iterations(self, request: Request) -> Response:
        """The newest steps of a model, oldest first; with `after_ns` the first later ones."""
        return iterations_response(self._backend, queried_model(self._backend, request), request)

    @described(json_of(ServerReport), tag="operations", query=(_MODEL,), errors=OF_NAMES)
    async def stats(self, request: Request) -> Response:
        """The server's numbers, with the engines' of all models, or of one that the query names."""
        return json_response(await self._stats(self._models(request)))

    @described(json_of(dict[str, MemoryReport]), tag="operations", query=(_MODEL,), errors=OF_NAMES)
    async def memory(self, request: Request) -> Response:
        """What lies where, by model; of one model if the query names it."""
        return json_response(await _memory(self._backend, self._models(request)))

    def _models(self, request: Request) -> list[str]:
        if "model" in request.query_params:
            return [queried_model(self._backend, request)]
        return [card.name for card in self._backend.models()]


def queried_model(backend: Backend, request: Request) -> str:
    """Return the model that the query names, or the default one. Raises ModelNotFoundError."""
    name = request.query_params.get("model")
    models = backend.models()
    if name is None and models:
        return models[0].name
    return backend.model(name or "").card.name


async def _memory(backend: Backend, models: list[str]) -> dict[str, MemoryReport]:
    """Return a report for each model. Raises NotReadyError until its engine has started once."""
    return {model: await _memory_of(backend, model) for model in models}


async def _memory_of(backend: Backend, model: str) -> MemoryReport:
    store = await backend.model(model).stored_adapters()
    await backend.model(model).adapter_activity()  # so that the numbers are of now
    memory = backend.model(model).memory()
    tiers = {name: getattr(memory, name) for name in ModelMemory.__struct_fields__}
    return MemoryReport(**tiers, store=store)
