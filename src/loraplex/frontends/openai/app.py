"""The routes of the OpenAI room, to be mounted on the one HTTP app of the server."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.frontends.openai.adapters import AdapterEndpoints
from loraplex.frontends.openai.catalog import ModelEndpoints, TokenEndpoints
from loraplex.frontends.openai.compare import CompareEndpoints
from loraplex.frontends.openai.errors import INVALID, ErrorDetail, json_error
from loraplex.frontends.openai.generation import GenerationEndpoints
from loraplex.frontends.openai.room import (
    Authenticate,
    Endpoint,
    OpenAIOptions,
    OpenAIRoom,
    answers_errors,
    everyone_is_local,
)
from loraplex.serving.backend import Backend

ALL_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def openai_routes(
    backend: Backend,
    options: OpenAIOptions | None = None,
    authenticate: Authenticate = everyone_is_local,
) -> APIRouter:
    """Every route of the room: generation, models, adapters, tokenizers."""
    room = OpenAIRoom(backend, options or OpenAIOptions(), authenticate)
    generation = GenerationEndpoints(room)
    comparison = CompareEndpoints(room)
    models = ModelEndpoints(room)
    adapters = AdapterEndpoints(room)
    tokens = TokenEndpoints(room)
    router = APIRouter(tags=["openai"])
    routes: tuple[tuple[str, str, Endpoint], ...] = (
        ("POST", "/v1/completions", generation.completions),
        ("POST", "/v1/chat/completions", generation.chat_completions),
        ("POST", "/v1/compare", comparison.compare),
        ("GET", "/v1/models", models.list_models),
        ("GET", "/v1/models/{model_id:path}", models.get_model),
        ("GET", "/v1/adapters", adapters.list_adapters),
        ("POST", "/v1/adapters", adapters.load_adapter),
        ("POST", "/v1/adapters/{name:path}/rollback", adapters.rollback),
        ("POST", "/v1/adapters/{name:path}/pin", adapters.pin),
        ("POST", "/v1/adapters/{name:path}/alias", adapters.alias),
        ("GET", "/v1/adapters/{name:path}", adapters.get_adapter),
        ("DELETE", "/v1/adapters/{name:path}", adapters.delete_adapter),
        ("POST", "/v1/load_lora_adapter", adapters.load_lora_adapter),
        ("POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
    )
    allowed: dict[str, set[str]] = {}
    for method, path, endpoint in routes:
        router.add_api_route(path, answers_errors(endpoint), methods=[method], response_model=None)
        allowed.setdefault(path, set()).add(method)
    for path, methods in allowed.items():
        _refuse_other_methods(router, path, methods)
    return router


def openai_fallback_routes() -> APIRouter:
    """404 in OpenAI's shape for the rest of /v1: include it after every other router."""
    router = APIRouter()
    router.add_api_route(
        "/v1/{path:path}",
        answers_errors(_no_such_route),
        methods=list(ALL_METHODS),
        response_model=None,
        include_in_schema=False,
    )
    return router


async def _no_such_route(request: Request) -> Response:
    message = f"there is no route {request.url.path}"
    return json_error(404, ErrorDetail(message, INVALID, None, "route_not_found"))


def _refuse_other_methods(router: APIRouter, path: str, allowed: set[str]) -> None:
    """405 in OpenAI's shape, which the framework would answer in its own."""
    methods = ", ".join(sorted(allowed))

    async def refuse(request: Request) -> Response:
        message = f"{request.url.path} does not take {request.method}; it takes {methods}"
        response = json_error(405, ErrorDetail(message, INVALID, None, "method_not_allowed"))
        response.headers["allow"] = methods
        return response

    router.add_api_route(
        path,
        answers_errors(refuse),
        methods=[method for method in ALL_METHODS if method not in allowed],
        response_model=None,
        include_in_schema=False,
    )
