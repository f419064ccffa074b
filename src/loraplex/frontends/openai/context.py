"""Shared parts of all endpoints: authentication, body parsing, error responses."""

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loraplex.core.errors import InvalidRequestError, ModelNotFoundError
from loraplex.core.principal import Principal
from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.body import parse, read_body
from loraplex.frontends.openai.dialect import OPENAI, Dialect
from loraplex.frontends.openai.errors import OPENAI_ERRORS, ErrorWriter, as_loraplex_error
from loraplex.frontends.openai.responses_api.store import StoreLimits
from loraplex.frontends.openai.schema import Body
from loraplex.frontends.openai.unsupported import refuse_unknown
from loraplex.frontends.openapi.operation import Parameter, with_error_responses
from loraplex.frontends.streams import ClientDisconnectedError
from loraplex.frontends.telemetry.request_ids import HEADER as REQUEST_ID_HEADER
from loraplex.frontends.telemetry.request_ids import MAX_LENGTH as MAX_REQUEST_ID_LENGTH
from loraplex.frontends.telemetry.request_ids import PATTERN as REQUEST_ID_PATTERN
from loraplex.frontends.telemetry.request_ids import problem as id_problem
from loraplex.frontends.telemetry.request_ids import request_id as usable_id
from loraplex.serving.backend import Backend, ModelCard
from loraplex.serving.wire_request import note_request_id

CLIENT_CLOSED_REQUEST = 499

BodyT = TypeVar("BodyT", bound=Body)

REQUEST_ID = Parameter(
    REQUEST_ID_HEADER,
    "Id of the request, which the response and the logs have; absent: one is generated.",
    {"type": "string", "pattern": f"^$|{REQUEST_ID_PATTERN}", "maxLength": MAX_REQUEST_ID_LENGTH},
)

Endpoint = Callable[[Request], Awaitable[Response]]


class OpenAIOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the OpenAI API."""

    max_body_bytes: int = 64 * 2**20
    max_prompts: int = 256
    """Prompts in one completion request."""
    dialect: Dialect = OPENAI
    """Dialect of the routes that generate."""
    stored_responses: StoreLimits = StoreLimits()
    """What is kept of the Responses API."""


class OpenAIContext(msgspec.Struct, frozen=True):
    """The backend, its options, and authentication."""

    backend: Backend
    options: OpenAIOptions = OpenAIOptions()
    authenticate: Authenticate = everyone_is_local

    def principal(self, request: Request) -> Principal:
        return self.authenticate(request.headers)

    async def body(self, request: Request, schema: type[BodyT]) -> BodyT:
        return await parse(schema, await read_body(request, self.options.max_body_bytes))

    async def strict_body(self, request: Request, schema: type[BodyT]) -> BodyT:
        """Parse a body; a field that is not in the schema is an error."""
        body = await self.body(request, schema)
        refuse_unknown(body)
        return body

    def target(self, model: str | None, principal: Principal) -> Target:
        """What `model` names; without one, the default base model."""
        if model is None:
            return Target(self._default(principal), None)
        return Target(*self.backend.find(model, principal))

    def _default(self, principal: Principal) -> ModelCard:
        models = self.backend.models(principal)
        if not models:
            raise ModelNotFoundError("there is no model here", param="model")
        return models[0]


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def request_id(request: Request) -> str:
    """The client's x-request-id, or a generated one; always the same for one request."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = usable_id(request.headers.get(REQUEST_ID_HEADER, ""))
    return str(request.state.request_id)


def adopt_request_id(request: Request, body_id: str | None) -> None:
    """Take the id that the body gives, unless there is an x-request-id. Raises InvalidRequestError
    for one that is too long or that no header can hold."""
    if not body_id or REQUEST_ID_HEADER in request.headers:
        return
    if wrong := id_problem(body_id, "request_id"):
        raise InvalidRequestError(wrong, param="request_id")
    request.state.request_id = body_id
    note_request_id(body_id)


def responds_to_errors(endpoint: Endpoint, errors: ErrorWriter = OPENAI_ERRORS) -> Endpoint:
    """Let an endpoint raise: `errors` writes the response; every response has x-request-id."""

    @functools.wraps(endpoint)
    async def response(request: Request) -> Response:
        own_id = request_id(request)
        try:
            if wrong := id_problem(request.headers.get(REQUEST_ID_HEADER) or own_id):
                raise InvalidRequestError(wrong)
            response = await endpoint(request)
        except (ClientDisconnectedError, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            response = errors.response(as_loraplex_error(error, own_id))
        response.headers[REQUEST_ID_HEADER] = request_id(request)
        return response

    return with_error_responses(response, errors.responses, errors.event_type, (REQUEST_ID,))
