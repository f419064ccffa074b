"""Routes of the OpenAI API, to be mounted on the one HTTP app of the server."""

import functools
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import NotReadyError, RequestError
from loraplex.core.version import __version__
from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openai.absent_routes import absent_endpoints
from loraplex.frontends.openai.adapter_usage import UsageEndpoints
from loraplex.frontends.openai.adapters import AdapterEndpoints
from loraplex.frontends.openai.catalog import ModelEndpoints, TokenEndpoints
from loraplex.frontends.openai.classify import ClassifyEndpoints
from loraplex.frontends.openai.compare import CompareEndpoints
from loraplex.frontends.openai.context import (
    Endpoint,
    OpenAIContext,
    OpenAIOptions,
    TextContext,
    json_response,
    responds_to_errors,
)
from loraplex.frontends.openai.dynamo import DynamoEndpoints
from loraplex.frontends.openai.embeddings import EmbeddingEndpoints
from loraplex.frontends.openai.errors import (
    INVALID,
    OPENAI_ERRORS,
    ErrorDetail,
    json_error,
)
from loraplex.frontends.openai.generation import GenerationEndpoints
from loraplex.frontends.openai.llgtrt.guidance import GuidanceEndpoints
from loraplex.frontends.openai.llgtrt.health import LlgtrtHealth
from loraplex.frontends.openai.lorax.endpoints import LORAX_ERRORS, LoraxEndpoints
from loraplex.frontends.openai.me import MeEndpoints
from loraplex.frontends.openai.responses_api.endpoints import ResponsesEndpoints
from loraplex.frontends.openai.scoring import ScoringEndpoints
from loraplex.frontends.openai.uploads import UploadEndpoints
from loraplex.frontends.openapi.operation import ResponseDoc, described, json_of
from loraplex.serving.backend import Backend
from loraplex.serving.wire_request import note_error

Routes = tuple[tuple[str, str, Endpoint], ...]
"""(method, path, endpoint)."""

_ALL_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
COHERE_PATHS: Final = ("/v2/embed", "/v2/rerank")
"""Paths of this front end among those of KServe."""
_MAX_PATH = 200
"""Characters of a path that a message repeats."""


class RouteNotFoundError(RequestError):
    code = "route_not_found"


class MethodNotAllowedError(RequestError):
    code = "method_not_allowed"


def openai_routes(
    backend: Backend,
    options: OpenAIOptions | None = None,
    authenticate: Authenticate = everyone_is_local,
) -> list[RecordedRoute]:
    """Return the routes for generation, models, adapters, and tokenizers."""
    context = OpenAIContext(backend, options or OpenAIOptions(), authenticate)
    tables = (
        (_generation, context.options.dialect.errors),
        (_models, OPENAI_ERRORS),
        (_adapters, OPENAI_ERRORS),
        (_responses, OPENAI_ERRORS),
        (_lorax, LORAX_ERRORS),
    )
    routes: list[RecordedRoute] = []
    allowed: dict[str, set[str]] = {}
    for table, errors in tables:
        for method, path, endpoint in table(context):
            route = RecordedRoute(path, responds_to_errors(endpoint, errors), methods=[method])
            routes.append(route)
            allowed.setdefault(path, {"OPTIONS"}).update(route.methods or ())
    for path, methods in allowed.items():
        routes += _other_methods(path, frozenset(methods))
    return [*routes, *_absent_routes()]


def text_routes(context: TextContext) -> list[RecordedRoute]:
    """Return the routes that need only texts and generation: the busiest ones."""
    errors = context.options.dialect.errors
    return [
        RecordedRoute(path, responds_to_errors(endpoint, errors), methods=[method])
        for method, path, endpoint in _completions(context)
    ]


def _completions(context: TextContext) -> Routes:
    generation, embeddings = GenerationEndpoints(context), EmbeddingEndpoints(context)
    classes, scoring = ClassifyEndpoints(context), ScoringEndpoints(context)
    return (
        ("POST", "/v1/completions", generation.completions),
        ("POST", "/v1/chat/completions", generation.chat_completions),
        ("POST", "/v1/embeddings", embeddings.embeddings),
        ("POST", COHERE_PATHS[0], embeddings.cohere_embed),
        ("POST", "/embed", embeddings.tei_embed),
        ("POST", "/predict", embeddings.tei_predict),
        ("GET", "/info", embeddings.tei_info),
        ("POST", "/pooling", embeddings.pooling),
        ("POST", "/classify", classes.classify),
        ("POST", "/v1/classify", classes.classify),
        ("POST", "/score", scoring.score),
        ("POST", "/v1/score", scoring.score),
        ("POST", "/rerank", scoring.rerank),
        ("POST", "/v1/rerank", scoring.rerank),
        ("POST", COHERE_PATHS[1], scoring.cohere_rerank),
    )


def _generation(context: OpenAIContext) -> Routes:
    """Routes of generation, in the dialect of the server."""
    guidance, health = GuidanceEndpoints(context), LlgtrtHealth(context)
    return (
        *_completions(context),
        ("POST", "/v1/run", guidance.run),
        ("POST", "/guidance", guidance.run),
        ("GET", "/v1/health/live", health.live),
        ("GET", "/v1/health/ready", health.ready),
        ("GET", "/v1/health/model", health.model),
    )


def _models(context: OpenAIContext) -> Routes:
    """Models, tokens, and probes."""
    comparison, models = CompareEndpoints(context), ModelEndpoints(context)
    tokens, probes = TokenEndpoints(context), ProbeEndpoints(context)
    return (
        ("GET", "/v1/me", MeEndpoints(context).me),
        ("POST", "/v1/compare", comparison.compare),
        ("POST", "/v1/compare/{id:path}/cancel", comparison.cancel),
        ("GET", "/v1/models", models.list_models),
        ("GET", "/v1/models/{model_id:path}", models.get_model),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/health", probes.health),
        ("GET", "/ping", probes.health),
        ("POST", "/ping", probes.health),
        ("GET", "/version", probes.version),
    )


def _adapters(context: OpenAIContext) -> Routes:
    """Their management."""
    adapters = AdapterEndpoints(context)
    dynamo, uploads = DynamoEndpoints(context, adapters), UploadEndpoints(context)
    return (
        ("GET", "/v1/adapters", adapters.list_adapters),
        ("POST", "/v1/adapters", adapters.load_adapter),
        ("POST", "/v1/adapters/{name:path}/rollback", adapters.rollback),
        ("POST", "/v1/adapters/{name:path}/pin", adapters.pin),
        ("POST", "/v1/adapters/{name:path}/alias", adapters.alias),
        ("GET", "/v1/adapters/{name:path}", adapters.get_adapter),
        ("DELETE", "/v1/adapters/{name:path}", adapters.delete_adapter),
        ("GET", "/v1/usage", UsageEndpoints(context).usage),
        ("POST", "/v1/load_lora_adapter", adapters.load_lora_adapter),
        ("POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter),
        ("POST", "/v1/uploads", uploads.create),
        ("GET", "/v1/uploads/{id}", uploads.get),
        ("DELETE", "/v1/uploads/{id}", uploads.delete),
        ("PUT", "/v1/uploads/{id}/{file}", uploads.put_file),
        ("GET", "/v1/loras", dynamo.list_loras),
        ("POST", "/v1/loras", dynamo.load_lora),
        ("DELETE", "/v1/loras/{name:path}", dynamo.unload_lora),
    )


def _responses(context: OpenAIContext) -> Routes:
    """Routes of OpenAI's Responses API."""
    responses = ResponsesEndpoints(context)
    return (
        ("POST", "/v1/responses", responses.create),
        ("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
        ("GET", "/v1/responses/{response_id}", responses.get),
        ("DELETE", "/v1/responses/{response_id}", responses.delete),
        ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", responses.input_items),
    )


def _lorax(context: OpenAIContext) -> Routes:
    """LoRAX's own."""
    lorax = LoraxEndpoints(context)
    return (
        ("POST", "/generate", lorax.generate),
        ("POST", "/generate_stream", lorax.generate_stream),
        ("POST", "/", lorax.either),
    )


def openai_fallback_routes() -> list[RecordedRoute]:
    """Return the routes that refuse the rest of /v1 with a 404 in OpenAI's format.

    They come after all other routes.
    """
    return [_hidden("/v1/{path:path}", responds_to_errors(_no_such_route), _ALL_METHODS)]


async def _no_such_route(request: Request) -> Response:
    return refused_route(request)


def refused_route(request: Request) -> Response:
    """Return a 404, and record it as the request's response."""
    path = request.url.path[:_MAX_PATH]
    return _refused(404, RouteNotFoundError(f"there is no route {request.method} {path}"))


def refused_method(request: Request, allowed: str) -> Response:
    """Return a 405, and record it as the request's response. allowed: the header `allow`."""
    path = request.url.path[:_MAX_PATH]
    message = f"{path} does not take {request.method}; it takes {allowed}"
    response = _refused(405, MethodNotAllowedError(message))
    response.headers["allow"] = allowed
    return response


def _refused(status: int, error: RequestError) -> Response:
    note_error(error)
    return json_error(status, ErrorDetail(error.message, INVALID, None, error.code))


@functools.cache
def _absent_routes() -> list[RecordedRoute]:
    """Return the routes that refuse what is not served: the same ones for each server."""
    return [_hidden(path, responds_to_errors(e), _ALL_METHODS) for path, e in absent_endpoints()]


@functools.cache
def _other_methods(path: str, allowed: frozenset[str]) -> list[RecordedRoute]:
    """Return the routes for OPTIONS, and for a 405 in OpenAI's format."""
    methods = ", ".join(sorted(allowed))

    async def options(request: Request) -> Response:
        del request
        return Response(status_code=204, headers={"allow": methods})

    async def refuse(request: Request) -> Response:
        return refused_method(request, methods)

    return [
        _hidden(path, responds_to_errors(options), ["OPTIONS"]),
        _hidden(path, responds_to_errors(refuse), [m for m in _ALL_METHODS if m not in allowed]),
    ]


def _hidden(path: str, endpoint: Endpoint, methods: Sequence[str]) -> RecordedRoute:
    """Return a route that is not in the OpenAPI document."""
    return RecordedRoute(path, endpoint, methods=methods, include_in_schema=False)


class Version(msgspec.Struct, frozen=True):
    version: str


class ProbeEndpoints:
    """Health routes. They need no key and return only public facts."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(ResponseDoc(200), tag="health", errors=(NotReadyError,))
    async def health(self, request: Request) -> Response:
        """Empty if requests would be served now; else 503 and the reason."""
        del request
        health = self._context.backend.health()
        if not health.ready:
            raise NotReadyError(health.reason)
        return Response(status_code=200)

    @described(json_of(Version), tag="health")
    async def version(self, request: Request) -> Response:
        """The version of the server."""
        del request
        return json_response(Version(__version__))
