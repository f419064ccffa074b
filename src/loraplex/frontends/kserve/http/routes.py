"""Routes under /v2 and their responses. Bodies are read, checked and written elsewhere."""

import asyncio
import base64
import binascii
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.errors import (
    InvalidRequestError,
    LoraplexError,
    PermissionDeniedError,
    UnsupportedFeatureError,
)
from loraplex.core.support import Support, support_note, support_of
from loraplex.frontends.access import (
    Authenticate,
    everyone_is_local,
    headers_of,
    principal_of,
    without_key,
)
from loraplex.frontends.body_limits import DEFAULT_JSON_LIMITS, JsonLimits, off_loop, parsed
from loraplex.frontends.kserve import wire_types as wire
from loraplex.frontends.kserve.errors import (
    AlreadyExistsError,
    NotFoundError,
    as_loraplex_error,
    message_of,
    status_of,
    status_of_kind,
)
from loraplex.frontends.kserve.http.body import (
    DEFAULT_MAX_BODY_BYTES,
    HEADER_LENGTH,
    Bytes,
    GenerateEvents,
    HttpRequest,
    WholeResponse,
    compress,
    decode_generate,
    decode_request,
    decompress,
    encode_generate,
    encode_response,
    json_response,
    parse_object,
)
from loraplex.frontends.kserve.messages import InferRequest, InferResponse
from loraplex.frontends.kserve.models.catalog import server_metadata
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.outputs import Wishes
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import (
    TenantMemory,
    no_cuda_region,
    refuse_cuda,
    tenant_with_memory,
)
from loraplex.frontends.long_json import encoded
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    JSON,
    OF_NAMES,
    Media,
    Operation,
    Parameter,
    ResponseDoc,
    by_status,
    described,
    events_of,
    json_body,
    json_of,
    operation_of,
)
from loraplex.frontends.streams import ClientDisconnectedError, until_disconnect

Handler = Callable[[HttpRequest], Awaitable[ASGIApp]]

BINARY = "application/octet-stream"
_LENGTH = HEADER_LENGTH.lower()
_JSON_LENGTH = Parameter(
    HEADER_LENGTH, "Bytes of JSON, where binary data follow it; absent where none do."
)

_OF_REGIONS = (PermissionDeniedError, NotFoundError, AlreadyExistsError)
_OF_LOADS = (*ANY_ERROR, NotFoundError)
_NOT_FOUND = json_response({"error": "Not Found"}, 404)
_described = functools.partial(described, tag="triton")
CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client has gone; only logs show it."""


_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def kserve_routes(
    service: TritonService,
    *,
    authenticate: Authenticate = everyone_is_local,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    json_limits: JsonLimits = DEFAULT_JSON_LIMITS,
) -> list[RecordedRoute]:
    """All routes under /v2. The last one returns 404 for every other path there."""
    api = KServeApi(service, max_body_bytes, json_limits)
    of_model: dict[str, Mapping[str, Handler]] = {
        "infer": {"POST": api.infer},
        "generate": {"POST": api.generate},
        "generate_stream": {"POST": api.generate_stream},
        "ready": {"GET": api.model_ready},
        "config": {"GET": api.config},
        "stats": {"GET": api.statistics},
    }
    table: list[tuple[str, Mapping[str, Handler]]] = []
    # The first that matches is taken, so the most frequent ones are first.
    for action, handlers in of_model.items():
        table.append((f"/v2/models/{{model:path}}/versions/{{version}}/{action}", handlers))
        table.append((f"/v2/models/{{model:path}}/{action}", handlers))
    without: dict[str, Mapping[str, Handler]] = {
        "/v2": {"GET": api.server_metadata},
        "/v2/health/live": {"GET": api.live},
        "/v2/health/ready": {"GET": api.ready},
    }
    table += [
        *without.items(),
        ("/v2/models/stats", {"GET": api.statistics}),
        *_admin_table(api),
        ("/v2/models/{model:path}/versions/{version}", {"GET": api.metadata}),
        ("/v2/models/{model:path}", {"GET": api.metadata}),
    ]
    routes = [
        RecordedRoute(path, Resource(handlers, without_key if path in without else authenticate))
        for path, handlers in table
    ]
    # Any other method is refused by the route of another front end under /v2, if there is one.
    rest = RecordedRoute("/v2/{path:path}", Resource({}, authenticate), methods=_METHODS)
    return [*routes, rest]


def _admin_table(api: "KServeApi") -> list[tuple[str, Mapping[str, Handler]]]:
    trace = {"GET": api.trace, "POST": api.change_trace}
    system, cuda = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    table: list[tuple[str, Mapping[str, Handler]]] = [
        ("/v2/trace/setting", trace),
        ("/v2/models/{model:path}/trace/setting", trace),
        ("/v2/logging", {"GET": api.log, "POST": api.change_log}),
        (f"{system}/region/{{region:path}}/register", {"POST": api.memory_register}),
        (f"{cuda}/region/{{region:path}}/register", {"POST": api.cuda_register}),
    ]
    for of_region in ("", "/region/{region:path}"):
        table += [
            (f"{system}{of_region}/status", {"GET": api.memory_status}),
            (f"{system}{of_region}/unregister", {"POST": api.memory_unregister}),
            (f"{cuda}{of_region}/status", {"GET": api.cuda_status}),
            (f"{cuda}{of_region}/unregister", {"POST": api.cuda_unregister}),
        ]
    for repository in ("/v2/repository", "/v2/repository/{repository}"):
        table += [
            (f"{repository}/index", {"POST": api.index}),
            (f"{repository}/models/{{model:path}}/load", {"POST": api.load}),
            (f"{repository}/models/{{model:path}}/unload", {"POST": api.unload}),
        ]
    return table


class Resource:
    """One path: a handler per method. Without handlers nothing is there.

    The bodies of 404 and 405 are Triton's.
    """

    def __init__(self, handlers: Mapping[str, Handler], authenticate: Authenticate) -> None:
        self._handlers = handlers
        self._authenticate = authenticate

    @property
    def features(self) -> Iterator[tuple[str, Support, str]]:
        """(method, what is done, why) of each handler."""
        for method, handler in self._handlers.items():
            yield (method, *support_of(handler))

    @property
    def operations(self) -> dict[str, Operation]:
        """Operations for the OpenAPI document."""
        found = {method: operation_of(handler) for method, handler in self._handlers.items()}
        return {
            method: msgspec.structs.replace(operation, error_responses=error_responses)
            for method, operation in found.items()
            if operation is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        handler = self._handlers.get(method)
        if not self._handlers:
            response: ASGIApp = _NOT_FOUND
        elif handler is None:
            not_allowed = json_response({"error": "Method Not Allowed"}, 405)
            not_allowed.headers["Allow"] = ", ".join(self._handlers)
            response = not_allowed
        else:
            try:
                principal = principal_of(scope, self._authenticate)
                request = HttpRequest(headers_of(scope), receive, principal, **scope["path_params"])
                response = await handler(request)
            except ClientDisconnectedError:
                response = Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as raised:
                response = refusal(as_loraplex_error(raised))
        await response(scope, receive, send)


def error_responses(kinds: Iterable[type[LoraplexError]]) -> Iterable[ResponseDoc]:
    """What a resource makes of its handlers' errors of these kinds."""
    return by_status((status_of_kind(kind).http, Media(JSON, wire.TritonFailure)) for kind in kinds)


def refusal(error: LoraplexError) -> Response:
    """Response to an error in Triton's form."""
    response = json_response({"error": message_of(error)}, status_of(error).http)
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    return response


class KServeApi:
    """The handlers."""

    def __init__(
        self,
        service: TritonService,
        max_body_bytes: int,
        json_limits: JsonLimits,
    ) -> None:
        self._service = service
        self._json_limits = json_limits
        self._max_body_bytes = max_body_bytes

    # ------------------------------------------------------------ server and models

    @_described(json_of(wire.ServerMetadata))
    async def server_metadata(self, request: HttpRequest) -> Response:
        """The server and its extensions."""
        del request
        return json_response(server_metadata())

    @_described(ResponseDoc(200), ResponseDoc(400, note="It is not."))
    async def live(self, request: HttpRequest) -> Response:
        """Whether the server is there."""
        del request
        return Response(status_code=200 if self._service.backend.health().live else 400)

    @_described(ResponseDoc(200), ResponseDoc(400, note="It is not."))
    async def ready(self, request: HttpRequest) -> Response:
        """Whether every model is ready."""
        del request
        return Response(status_code=200 if self._service.backend.health().ready else 400)

    @_described(ResponseDoc(200), json_of(wire.TritonFailure, 400, "It is not."))
    async def model_ready(self, request: HttpRequest) -> Response:
        """Whether the model is ready."""
        if self._service.catalog.is_ready(request.model, request.version, request.principal):
            return Response(status_code=200)
        return json_response({"error": "Model version not ready"}, 400)

    @_described(json_of(wire.ModelMetadata), errors=OF_NAMES)
    async def metadata(self, request: HttpRequest) -> Response:
        """The inputs and outputs of a model."""
        model = self._service.catalog.find(request.model, request.version, request.principal)
        return json_response(model.metadata())

    @_described(json_of(wire.ModelConfig), errors=OF_NAMES)
    async def config(self, request: HttpRequest) -> Response:
        """The configuration of a model."""
        model = self._service.catalog.find(request.model, request.version, request.principal)
        return json_response(model.configuration())

    @_described(json_of(wire.StatisticsReport), errors=OF_NAMES)
    async def statistics(self, request: HttpRequest) -> Response:
        """What requests did, by model."""
        rows = self._service.statistics(request.model, request.version, request.principal)
        return json_response({"model_stats": rows})

    # ------------------------------------------------------------ inference

    @_described(
        ResponseDoc(200, (Media(JSON, wire.InferResult), Media(BINARY))),
        body=json_body(wire.InferBody),
        headers=(_JSON_LENGTH,),
        response_headers=(_JSON_LENGTH,),
        errors=ANY_ERROR,
    )
    async def infer(self, request: HttpRequest) -> WholeResponse:
        """Tensors in, tensors out."""
        model, version, principal = request.model, request.version, request.principal
        self._service.catalog.find(model, version, principal, end_point="HTTP end point")
        body: Bytes = await request.body(self._max_body_bytes)
        if encoding := request.headers.get("content-encoding", ""):
            body = await asyncio.to_thread(decompress, body, encoding, self._max_body_bytes)
        decode = functools.partial(
            decode_request,
            body,
            request.headers.get(_LENGTH),
            model=model,
            version=version,
            memory=TenantMemory(self._service.memory, principal.tenant),
            limits=self._json_limits,
        )
        infer_request, wishes = await parsed(len(body), decode)
        response = await until_disconnect(
            request.receive, self._service.infer(infer_request, principal)
        )
        accepted = request.headers.get("accept-encoding", "")
        write = functools.partial(_infer_response, response, wishes, accepted)
        return await off_loop(response.num_bytes, write)

    @_described(
        json_of(wire.TritonGenerateResult),
        body=json_body(wire.TritonGenerateBody),
        errors=ANY_ERROR,
    )
    async def generate(self, request: HttpRequest) -> WholeResponse:
        """One flat object in, one out."""
        infer_request = await self._generate_request(request)
        if self._wants_stream(infer_request):
            raise InvalidRequestError(
                "generate expects model to produce exactly 1 response, use generate stream for "
                "model that generates various number of responses"
            )
        response = await until_disconnect(
            request.receive, self._service.infer(infer_request, request.principal)
        )
        content = await off_loop(response.num_bytes, lambda: encoded(encode_generate(response)))
        return WholeResponse(content, b"application/json", {})

    @_described(
        ResponseDoc(
            200,
            (
                events_of(wire.TritonGenerateResult),
                events_of(wire.TritonFailure),
            ),
        ),
        body=json_body(wire.TritonGenerateBody),
        errors=ANY_ERROR,
    )
    async def generate_stream(self, request: HttpRequest) -> GenerateEvents:
        """Generate; every response is an event."""
        infer_request = await self._generate_request(request)
        responses = await until_disconnect(
            request.receive, self._service.stream(infer_request, request.principal)
        )
        return GenerateEvents(responses)

    async def _generate_request(self, request: HttpRequest) -> InferRequest:
        model = self._service.catalog.find(request.model, request.version, request.principal)
        encoding = request.headers.get("content-encoding", "")
        if encoding.strip().lower() not in ("", "identity"):
            raise InvalidRequestError(
                f"Unsupported content-encoding '{encoding}', only 'identity' is supported."
            )
        body = await request.body(min(self._max_body_bytes, self._json_limits.max_bytes))
        read = functools.partial(
            _generate_request_of, model, request.version, body, self._json_limits
        )
        return await parsed(len(body), read)

    def _wants_stream(self, request: InferRequest) -> bool:
        row = self._service.catalog.find(request.model).kind.input_of("is_streamed")
        tensors = (tensor for tensor in request.inputs if tensor.name == row)
        return any(tensor.array.any() for tensor in tensors)

    # ------------------------------------------------------------ shared memory

    @_described(json_of(list[wire.Region]), errors=_OF_REGIONS)
    async def memory_status(self, request: HttpRequest) -> Response:
        """Registered regions of shared memory."""
        tenant = tenant_with_memory(request.principal)
        regions = self._service.memory.status(tenant, request.region)
        return json_response([dataclasses.asdict(region) for region in regions])

    @_described(ResponseDoc(200), body=json_body(wire.RegionBody), errors=_OF_REGIONS)
    async def memory_register(self, request: HttpRequest) -> Response:
        """Register a region of shared memory."""
        tenant = tenant_with_memory(request.principal)
        body = await self._object(request)
        for field in ("key", "byte_size"):
            if field not in body:
                raise InvalidRequestError(
                    f"Shared memory register request has no '{field}' field", param=field
                )
        key = body["key"]
        if not isinstance(key, str):
            raise InvalidRequestError("'key' must be a string", param="key")
        self._service.memory.register(
            tenant,
            request.region,
            key,
            _natural(body, "offset"),
            _natural(body, "byte_size"),
        )
        return Response()

    @_described(ResponseDoc(200), errors=_OF_REGIONS)
    async def memory_unregister(self, request: HttpRequest) -> Response:
        """Forget a region of shared memory, or all."""
        tenant = tenant_with_memory(request.principal)
        self._service.memory.unregister(tenant, request.region)
        return Response()

    @support_note("there is no region", Support.NO_EFFECT)
    @_described(json_of(list[wire.Region]), errors=_OF_REGIONS)
    async def cuda_status(self, request: HttpRequest) -> Response:
        """There is none, and so no region of a name."""
        if request.region:
            no_cuda_region(request.region)
        return json_response([])

    @support_note("use system shared memory", Support.REFUSED)
    @_described(errors=(UnsupportedFeatureError, *_OF_REGIONS))
    async def cuda_register(self, request: HttpRequest) -> Response:
        """Refused: use system shared memory."""
        del request
        refuse_cuda()

    @support_note("there is no region", Support.NO_EFFECT)
    @_described(ResponseDoc(200))
    async def cuda_unregister(self, request: HttpRequest) -> Response:
        """There is none."""
        del request
        return Response()

    # ------------------------------------------------------------ settings

    @_described(json_of(wire.TraceSettings), errors=OF_NAMES)
    async def trace(self, request: HttpRequest) -> Response:
        """Trace settings."""
        settings = self._service.management.change_trace(request.principal, request.model)
        return json_response(settings)

    @support_note("kept and returned; nothing is traced by it", Support.NO_EFFECT)
    @_described(
        json_of(wire.TraceSettings), body=json_body(wire.Changes), needs_body=False, errors=OF_NAMES
    )
    async def change_trace(self, request: HttpRequest) -> Response:
        """Change trace settings."""
        body = await self._object(request)
        changes = {name: _strings(name, value) for name, value in body.items()}
        management = self._service.management
        return json_response(management.change_trace(request.principal, request.model, changes))

    @_described(json_of(wire.LogSettings), errors=OF_NAMES)
    async def log(self, request: HttpRequest) -> Response:
        """Log settings."""
        return json_response(self._service.management.change_log(request.principal))

    @_described(
        json_of(wire.LogSettings), body=json_body(wire.Changes), needs_body=False, errors=OF_NAMES
    )
    async def change_log(self, request: HttpRequest) -> Response:
        """Change log settings."""
        body = await self._object(request)
        return json_response(self._service.management.change_log(request.principal, body))

    # ------------------------------------------------------------ the repository

    @support_note("a repository's name is refused")
    @_described(json_of(list[wire.IndexRow]), body=json_body(wire.IndexBody), needs_body=False)
    async def index(self, request: HttpRequest) -> Response:
        """The models of the repository."""
        body = await self._object(request)
        only_ready = body.get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequestError("'ready' must be true or false", param="ready")
        rows = self._service.management.index(
            request.principal, request.repository, only_ready=only_ready
        )
        return json_response([{k: v for k, v in row.items() if v} for row in rows])

    @support_note("with --model-control-mode explicit")
    @_described(
        ResponseDoc(200), body=json_body(wire.ControlBody), needs_body=False, errors=_OF_LOADS
    )
    async def load(self, request: HttpRequest) -> Response:
        """Load a model."""
        parameters = {
            name: _file_content(name, value) if name.startswith("file:") else value
            for name, value in (await self._parameters(request)).items()
        }
        await self._service.management.load(
            request.principal, request.repository, request.model, parameters
        )
        return Response()

    @support_note("with --model-control-mode explicit")
    @_described(
        ResponseDoc(200), body=json_body(wire.ControlBody), needs_body=False, errors=_OF_LOADS
    )
    async def unload(self, request: HttpRequest) -> Response:
        """Unload a model."""
        parameters = await self._parameters(request)
        self._service.management.unload(
            request.principal, request.repository, request.model, parameters
        )
        return Response()

    async def _parameters(self, request: HttpRequest) -> Mapping[str, Any]:
        parameters = (await self._object(request)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidRequestError("'parameters' must be a JSON object", param="parameters")
        return parameters

    async def _object(self, request: HttpRequest) -> dict[str, Any]:
        body = await request.body(self._max_body_bytes)
        # Files of a model may be in it, which only operators send.
        return await parsed(len(body), functools.partial(parse_object, body))


def _generate_request_of(
    model: TritonModel, version: str, body: Bytes, limits: JsonLimits
) -> InferRequest:
    limits.check(body)
    return decode_generate(model, version, parse_object(body))


def _infer_response(response: InferResponse, wishes: Wishes, accepted: str) -> WholeResponse:
    """accepted: the client's header Accept-Encoding."""
    pieces, json_length = encode_response(response, wishes)
    content, headers = compress(pieces, accepted)
    if json_length is None:
        return WholeResponse(content, b"application/json", headers)
    headers[HEADER_LENGTH] = str(json_length)
    return WholeResponse(content, b"application/octet-stream", headers)


def _natural(body: Mapping[str, Any], field: str) -> int:
    value = body.get(field, 0)
    if type(value) is not int or not 0 <= value < 2**63:
        raise InvalidRequestError(f"'{field}' must be an integer that is not negative", param=field)
    return value


def _strings(name: str, value: object) -> Sequence[str] | None:
    """The values of a trace setting: one or several strings, or numbers; null for its default."""
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) or type(each) is int for each in values):
        raise InvalidRequestError(
            f"'{name[:80]}' must be a string, a list of strings or null", param=name
        )
    return [str(each) for each in values]


def _file_content(name: str, value: object) -> bytes:
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise InvalidRequestError(f"'{name[:80]}' must be a file's content as base64", param=name)
