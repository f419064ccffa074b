"""Shared parts of all endpoints: authentication, body parsing, error responses."""

import functools
import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loraplex.core.errors import InvalidRequestError, ModelNotFoundError
from loraplex.core.principal import Principal
from loraplex.frontends.access import Authenticate, everyone_is_local, headers_of, principal_of
from loraplex.frontends.body_limits import DEFAULT_JSON_LIMITS, JsonLimits, parsed
from loraplex.frontends.long_json import LongResponse, encoded
from loraplex.frontends.openai.adapter_fields import ADAPTER_HEADER, ModelTarget
from loraplex.frontends.openai.body import parse_body, read_body
from loraplex.frontends.openai.errors import (
    OPENAI_ERRORS,
    ErrorWriter,
    as_loraplex_error,
    raise_all,
)
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.schema import ChatBody, GenerationBody, JsonBody
from loraplex.frontends.openai.unsupported import (
    refuse_undefined,
    refuse_unsupported,
)
from loraplex.frontends.openai.writers import (
    DIGESTS_HEADER,
    ExpandedPromptWriter,
    ResponseWriter,
)
from loraplex.frontends.openapi.operation import Parameter, with_error_responses
from loraplex.frontends.streams import ClientDisconnectedError
from loraplex.frontends.telemetry.telemetry import (
    MAX_REQUEST_ID_LENGTH,
    REQUEST_ID_HEADER,
    REQUEST_ID_PATTERN,
    request_id_problem,
    usable_request_id,
)
from loraplex.serving.backend import Backend, ModelCard, TextBackend
from loraplex.serving.wire_request import note_request_id

CLIENT_CLOSED_REQUEST = 499

BodyT = TypeVar("BodyT", bound=JsonBody)
GenerationT = TypeVar("GenerationT", bound=GenerationBody)

REQUEST_ID = Parameter(
    REQUEST_ID_HEADER,
    "Id of the request, which the response and the logs have; absent: one is generated.",
    {"type": "string", "pattern": f"^$|{REQUEST_ID_PATTERN}", "maxLength": MAX_REQUEST_ID_LENGTH},
)

BY_HEADER = Parameter(ADAPTER_HEADER, "An adapter of the base model, as lora_model names it.")
DIGESTS = Parameter(
    DIGESTS_HEADER, "Digests of the adapters that were used; absent for the base model."
)

Endpoint = Callable[[Request], Awaitable[Response]]


class ReadBody(Protocol):
    """Function that reads the body of a request. Raises RequestErrors."""

    async def __call__(self, request: Request, schema: type[GenerationT]) -> GenerationT: ...


class ApiDialect:
    """Behaviour of the generation routes that differs between servers; this one is OpenAI's.

    Stateless: every call of a server goes through the same one.
    """

    errors: ErrorWriter = OPENAI_ERRORS
    shows_schema = False
    """Whether a chat template gets the schema of response_format by default."""
    unready_status = 503
    """Status of the health routes while not ready."""
    is_ready_at_once = False
    """Whether GET /v1/health/ready succeeds even while the server starts or drains."""

    def reader(self, context: "TextContext") -> "ReadBody":
        """Return the function that reads the body of a completion or a chat."""
        return functools.partial(context.parse, refuse=context.refuse_extra)

    async def target(
        self, context: "TextContext", body: GenerationBody, principal: Principal
    ) -> ModelTarget:
        return await context.target(body.model, principal)

    def rendering(self, body: ChatBody) -> dict[str, Any]:
        """Arguments of Chats.render that go before those of the route."""
        shows = body.include_json_schema_in_prompt
        arguments: dict[str, Any] = {}
        if body.reasoning_effort is not None:
            arguments["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            arguments["enable_thinking"] = False
        arguments |= body.chat_template_kwargs or {}
        if shows or (shows is None and self.shows_schema):
            schema = schema_of(body.response_format)
            arguments = ({} if schema is None else {"json_schema": schema}) | arguments
        hidden = {"tools": None} if shows is False else {}
        return {"template_kwargs": arguments or None, **hidden}

    def writer(
        self, writer: ResponseWriter, body: GenerationBody, texts: TokenTexts
    ) -> ResponseWriter:
        """Writer that replaces the default one."""
        return ExpandedPromptWriter(writer, texts) if body.return_expanded_prompt else writer


OPENAI = ApiDialect()


def schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema in it; None if there is none."""
    inner = (response_format or {}).get("json_schema")
    return inner.get("schema") if isinstance(inner, dict) else None


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits per tenant. The oldest responses are removed first."""

    max_responses: int = 1000
    """0: nothing is kept."""
    max_bytes: int = 64 << 20
    """Size of responses and their conversations, as JSON."""
    max_seconds: float = 86400.0
    """Lifetime after the end of a response."""


class OpenAIOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the OpenAI API."""

    json: JsonLimits = DEFAULT_JSON_LIMITS
    max_discarded_bytes: int = 64 << 20
    """Bytes that are read of a body that is too large, so that its client reads the response."""
    max_prompts: int = 256
    """Prompts in one completion request."""
    dialect: ApiDialect = OPENAI
    """Dialect of the routes that generate."""
    stored_responses: StoreLimits = StoreLimits()
    """What is kept of the Responses API."""
    has_keys: bool = False
    """Whether the server requires API keys."""
    ignores_unknown: bool = False
    """Whether fields that no supported server defines are ignored instead of refused."""


class TextContext(msgspec.Struct, frozen=True):
    """What the routes of generation share: the backend, its options, and authentication."""

    backend: TextBackend
    options: OpenAIOptions = OpenAIOptions()
    authenticate: Authenticate = everyone_is_local

    def principal(self, request: Request) -> Principal:
        return principal_of(request.scope, self.authenticate)

    async def parse(
        self,
        request: Request,
        schema: type[BodyT],
        refuse: Callable[[BodyT], object] | None = None,
    ) -> BodyT:
        """Parse a body. refuse: raises RequestErrors for fields that are not in the schema."""
        limits = self.options.json
        text = await read_body(request, limits.max_bytes, self.options.max_discarded_bytes)
        body = await parsed(len(text), functools.partial(parse_body, schema, text, limits))
        if refuse is not None and body.model_extra:
            refuse(body)
        return body

    def refuse_extra(
        self,
        body: BodyT,
        more_known: Collection[str] = (),
        checks: Iterable[Callable[[BodyT], object]] = (refuse_unsupported,),
    ) -> None:
        """Refuse fields of a body that may have fields of other servers: a field that none of them
        defines is an error, unless the server ignores it. more_known: see refuse_undefined; checks:
        what else raises RequestErrors, all of which one error lists."""
        unknown = () if self.options.ignores_unknown else (more_known,)
        raise_all(
            [
                *(functools.partial(refuse_undefined, body, known) for known in unknown),
                *(functools.partial(check, body) for check in checks),
            ]
        )

    async def target(self, model: str | None, principal: Principal) -> ModelTarget:
        """What `model` names; without one, the default base model."""
        if model is None:
            return ModelTarget(self._default(principal), None)
        return ModelTarget(*await self.backend.find(model, principal))

    def _default(self, principal: Principal) -> ModelCard:
        models = self.backend.models(principal)
        if not models:
            raise ModelNotFoundError("there is no model here", param="model")
        return models[0]


class OpenAIContext(TextContext, frozen=True):
    """The same for all routes."""

    backend: Backend


def json_response(body: msgspec.Struct | list[Any], status: int = 200) -> Response:
    pieces = encoded(body)
    if len(pieces) > 1:
        return LongResponse(pieces, status, "application/json")
    return Response(pieces[0], status_code=status, media_type="application/json")


def tagged_response(request: Request, body: msgspec.Struct) -> Response:
    """Respond with an ETag, and without the body to a client that has it."""
    content = msgspec.json.encode(body)
    headers = {"etag": f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"'}
    known = request.headers.get("if-none-match", "").split(",")
    if headers["etag"] in (tag.strip().removeprefix("W/") for tag in known):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type="application/json")


def request_id(request: Request) -> str:
    """The client's x-request-id, or a generated one; always the same for one request."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = usable_request_id(request.headers.get(REQUEST_ID_HEADER, ""))
    return str(request.state.request_id)


def adopt_request_id(request: Request, body_id: str | None) -> None:
    """Take the id that the body gives, unless there is an x-request-id. Raises InvalidRequestError
    for one that is too long or that no header can hold."""
    if not body_id or REQUEST_ID_HEADER in request.headers:
        return
    if wrong := request_id_problem(body_id, "request_id"):
        raise InvalidRequestError(wrong, param="request_id")
    request.state.request_id = body_id
    note_request_id(body_id)


def responds_to_errors(endpoint: Endpoint, errors: ErrorWriter = OPENAI_ERRORS) -> Endpoint:
    """Let an endpoint raise: `errors` writes the response; every response has x-request-id."""

    @functools.wraps(endpoint)
    async def response(request: Request) -> Response:
        own_id = request_id(request)
        try:
            given_id = headers_of(request.scope).get(REQUEST_ID_HEADER)
            if given_id and (wrong := request_id_problem(given_id)):
                raise InvalidRequestError(wrong)
            response = await endpoint(request)
        except (ClientDisconnectedError, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            response = errors.response(as_loraplex_error(error, own_id))
        response.headers[REQUEST_ID_HEADER] = request_id(request)
        return response

    return with_error_responses(response, errors.responses, errors.event_type, (REQUEST_ID,))
