"""What every endpoint shares: who asks, how a body is read, how an error is answered."""

import functools
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loraplex.core.errors import InvalidRequestError
from loraplex.core.principal import LOCAL, Principal
from loraplex.frontends.openai.body import parse_body, read_body
from loraplex.frontends.openai.convert import Target
from loraplex.frontends.openai.errors import as_loraplex_error, error_response
from loraplex.frontends.openai.schema import Body
from loraplex.frontends.openai.unsupported import refuse_unknown
from loraplex.frontends.streams import ClientDisconnectedError
from loraplex.serving.backend import Backend

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LENGTH = 256
CLIENT_CLOSED_REQUEST = 499

BodyT = TypeVar("BodyT", bound=Body)

Endpoint = Callable[[Request], Awaitable[Response]]

Authenticate = Callable[[Mapping[str, str]], Principal]
"""From request headers (case-insensitive) to who asks. Raises UnauthenticatedError."""


def everyone_is_local(headers: Mapping[str, str]) -> Principal:
    """The server without API keys."""
    del headers
    return LOCAL


class OpenAIOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the room."""

    max_body_bytes: int = 64 * 2**20
    max_prompts: int = 256
    """Prompts in one completion request."""


class OpenAIRoom(msgspec.Struct, frozen=True):
    """The backend behind the room, and the ways in."""

    backend: Backend
    options: OpenAIOptions = OpenAIOptions()
    authenticate: Authenticate = everyone_is_local

    def principal(self, request: Request) -> Principal:
        return self.authenticate(request.headers)

    async def body(self, request: Request, schema: type[BodyT]) -> BodyT:
        return parse_body(schema, await read_body(request, self.options.max_body_bytes))

    async def strict_body(self, request: Request, schema: type[BodyT]) -> BodyT:
        """As body; a field that is not in the schema is an error."""
        body = await self.body(request, schema)
        refuse_unknown(body)
        return body

    def target(self, model: str | None, principal: Principal) -> Target:
        """What `model` names; without one, the default base model."""
        if model is None:
            return Target(self.backend.models()[0], None)
        return Target(*self.backend.find(model, principal))


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def request_id(request: Request) -> str:
    """The client's x-request-id, or one of ours; the same whenever it is asked for."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
    return str(request.state.request_id)


def answers_errors(endpoint: Endpoint) -> Endpoint:
    """Let an endpoint raise: errors become OpenAI's bodies; every answer carries x-request-id."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        own_id = request_id(request)
        try:
            _check_request_id(own_id)
            response = await endpoint(request)
        except (ClientDisconnectedError, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            response = error_response(as_loraplex_error(error, own_id))
        response.headers[REQUEST_ID_HEADER] = own_id[:MAX_REQUEST_ID_LENGTH]
        return response

    return answer


def _check_request_id(text: str) -> None:
    if len(text) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError(
            f"{REQUEST_ID_HEADER} has {len(text)} characters; at most {MAX_REQUEST_ID_LENGTH} are "
            "allowed"
        )
