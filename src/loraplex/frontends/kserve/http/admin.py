"""Routes other than inference: shared memory, settings, and which models are loaded."""

import base64
import binascii
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from loraplex.core.errors import InvalidRequestError, PermissionDeniedError, UnsupportedFeatureError
from loraplex.core.support import Support, support_note
from loraplex.frontends.body_limits import off_loop
from loraplex.frontends.kserve import wire_types as wire
from loraplex.frontends.kserve.errors import AlreadyExistsError, NotFoundError
from loraplex.frontends.kserve.http.body import HttpRequest, json_response, parse_object
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import (
    no_cuda_region,
    refuse_cuda,
    tenant_with_memory,
)
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    OF_NAMES,
    ResponseDoc,
    described,
    json_body,
    json_of,
)

OF_REGIONS = (PermissionDeniedError, NotFoundError, AlreadyExistsError)
OF_LOADS = (*ANY_ERROR, NotFoundError)


class AdminApi:
    """The handlers."""

    def __init__(self, service: TritonService, max_body_bytes: int) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes

    # ------------------------------------------------------------ shared memory

    @described(json_of(list[wire.Region]), tag="triton", errors=OF_REGIONS)
    async def memory_status(self, request: HttpRequest) -> Response:
        """Registered regions of shared memory."""
        tenant = tenant_with_memory(request.principal)
        regions = self._service.memory.status(tenant, request.region)
        return json_response([dataclasses.asdict(region) for region in regions])

    @described(ResponseDoc(200), tag="triton", body=json_body(wire.RegionBody), errors=OF_REGIONS)
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

    @described(ResponseDoc(200), tag="triton", errors=OF_REGIONS)
    async def memory_unregister(self, request: HttpRequest) -> Response:
        """Forget a region of shared memory, or all."""
        tenant = tenant_with_memory(request.principal)
        self._service.memory.unregister(tenant, request.region)
        return Response()

    @support_note("there is no region", Support.NO_EFFECT)
    @described(json_of(list[wire.Region]), tag="triton", errors=OF_REGIONS)
    async def cuda_status(self, request: HttpRequest) -> Response:
        """There is none, and so no region of a name."""
        if request.region:
            no_cuda_region(request.region)
        return json_response([])

    @support_note("use system shared memory", Support.REFUSED)
    @described(tag="triton", errors=(UnsupportedFeatureError, *OF_REGIONS))
    async def cuda_register(self, request: HttpRequest) -> Response:
        """Refused: use system shared memory."""
        del request
        refuse_cuda()

    @support_note("there is no region", Support.NO_EFFECT)
    @described(ResponseDoc(200), tag="triton")
    async def cuda_unregister(self, request: HttpRequest) -> Response:
        """There is none."""
        del request
        return Response()

    # ------------------------------------------------------------ settings

    @described(json_of(wire.TraceSettings), tag="triton", errors=OF_NAMES)
    async def trace(self, request: HttpRequest) -> Response:
        """Trace settings."""
        settings = self._service.management.trace_settings(request.principal, request.model)
        return json_response(settings)

    @support_note("kept and returned; nothing is traced by it", Support.NO_EFFECT)
    @described(
        json_of(wire.TraceSettings),
        body=json_body(wire.Changes),
        needs_body=False,
        tag="triton",
        errors=OF_NAMES,
    )
    async def change_trace(self, request: HttpRequest) -> Response:
        """Change trace settings."""
        body = await self._object(request)
        changes = {name: _strings(name, value) for name, value in body.items()}
        management = self._service.management
        return json_response(management.change_trace(request.principal, request.model, changes))

    @described(json_of(wire.LogSettings), tag="triton", errors=OF_NAMES)
    async def log(self, request: HttpRequest) -> Response:
        """Log settings."""
        return json_response(self._service.management.log_settings(request.principal))

    @described(
        json_of(wire.LogSettings),
        body=json_body(wire.Changes),
        needs_body=False,
        tag="triton",
        errors=OF_NAMES,
    )
    async def change_log(self, request: HttpRequest) -> Response:
        """Change log settings."""
        body = await self._object(request)
        return json_response(self._service.management.change_log(request.principal, body))

    # ------------------------------------------------------------ the repository

    @support_note("a repository's name is refused")
    @described(
        json_of(list[wire.IndexRow]), body=json_body(wire.IndexBody), needs_body=False, tag="triton"
    )
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
    @described(
        ResponseDoc(200),
        body=json_body(wire.ControlBody),
        needs_body=False,
        tag="triton",
        errors=OF_LOADS,
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
    @described(
        ResponseDoc(200),
        body=json_body(wire.ControlBody),
        needs_body=False,
        tag="triton",
        errors=OF_LOADS,
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
        return await off_loop(len(body), functools.partial(parse_object, body))


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
