"""/v1/uploads: files of an adapter, which POST /v1/adapters then loads as upload://ID."""

from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.adapters.uploads import UPLOADS_ARE_OFF, UploadCard, Uploads
from loraplex.core.errors import (
    PayloadTooLargeError,
    RateLimitedError,
    StorageFullError,
    StorageUnavailableError,
    UnsupportedFeatureError,
    UploadNotFoundError,
)
from loraplex.frontends.body_limits import passing_body
from loraplex.frontends.openai.body import declared_bytes, discard
from loraplex.frontends.openai.context import OpenAIContext, json_response
from loraplex.frontends.openapi.operation import (
    OF_BODIES,
    ErrorKinds,
    Media,
    described,
    json_of,
)

_OF_STORAGE: Final[ErrorKinds] = (StorageFullError, StorageUnavailableError)
_OF_UPLOADS: Final[ErrorKinds] = (UnsupportedFeatureError, UploadNotFoundError)


class ShownUpload(UploadCard, frozen=True, kw_only=True):
    object: Literal["upload"] = "upload"


class UploadDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["upload"] = "upload"
    deleted: bool = True


class UploadEndpoints:
    """Uploads of the tenant that sends the request."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(
        json_of(ShownUpload, 201, "It has no files yet."),
        tag="adapters",
        errors=(UnsupportedFeatureError, RateLimitedError, *_OF_STORAGE),
    )
    async def create(self, request: Request) -> Response:
        """Begin an upload of an adapter's files."""
        uploads, tenant = self._uploads(request)
        return _shown(await uploads.create(tenant), 201)

    @described(
        json_of(ShownUpload),
        body=Media("application/octet-stream", {"type": "string", "format": "binary"}),
        tag="adapters",
        errors=(*_OF_UPLOADS, *OF_BODIES, *_OF_STORAGE),
    )
    async def put_file(self, request: Request) -> Response:
        """Send one file of an upload. It replaces one of its name when it is complete."""
        uploads, tenant = self._uploads(request)
        num_bytes, body = declared_bytes(request), passing_body(request)
        given = request.path_params
        try:
            with uploads.begin_file(given["id"], tenant, given["file"], num_bytes) as file:
                async for piece in body:
                    await file.add(piece)
                return _shown(await file.finish())
        except PayloadTooLargeError:
            await discard(request, body, self._context.options.max_discarded_bytes)
            raise

    @described(json_of(ShownUpload), tag="adapters", errors=_OF_UPLOADS)
    async def get(self, request: Request) -> Response:
        """Files of an upload, and their sizes."""
        uploads, tenant = self._uploads(request)
        return _shown(uploads.describe(request.path_params["id"], tenant))

    @described(json_of(UploadDeleted), tag="adapters", errors=_OF_UPLOADS)
    async def delete(self, request: Request) -> Response:
        """Remove an upload and its files."""
        uploads, tenant = self._uploads(request)
        upload_id = request.path_params["id"]
        await uploads.delete(upload_id, tenant)
        return json_response(UploadDeleted(id=upload_id))

    def _uploads(self, request: Request) -> tuple[Uploads, str]:
        """Return the uploads and the tenant. Raises PermissionDeniedError without the right, and
        UnsupportedFeatureError where there are no uploads."""
        principal = self._context.principal(request)
        principal.require_manages()
        uploads = self._context.backend.uploads
        if uploads is None:
            raise UnsupportedFeatureError(UPLOADS_ARE_OFF)
        return uploads, principal.tenant


def _shown(card: UploadCard, status: int = 200) -> Response:
    return json_response(ShownUpload(**msgspec.structs.asdict(card)), status)
