"""llgtrt's errors: nearly all of them HTTP 500, with a text."""

from collections.abc import Iterable
from typing import Final

import msgspec
from starlette.responses import PlainTextResponse, Response

from loraplex.core.errors import LoraplexError, RequestError, UnauthenticatedError
from loraplex.frontends.openapi.operation import JSON, TEXT, Media, ResponseDoc, by_status

SHAPE_STATUSES: Final = (400, 413, 415, 422)


class ShapeError(RequestError):
    """The body is no JSON, or a field is missing or of another type."""

    def __init__(self, message: str, status: int, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status


class CompatError(msgspec.Struct, frozen=True):
    error: str


class CompatEventDetail(msgspec.Struct, frozen=True):
    message: str
    status_code: int = 500


class CompatErrorEvent(msgspec.Struct, frozen=True):
    error: CompatEventDetail


class CompatErrors:
    def response(self, error: LoraplexError) -> Response:
        if isinstance(error, ShapeError):
            return PlainTextResponse(error.message, error.status)
        if isinstance(error, UnauthenticatedError):
            return Response(status_code=401)
        body = msgspec.json.encode(CompatError(error.message))
        return Response(body, 500, media_type="application/json")

    @property
    def event_type(self) -> type[msgspec.Struct]:
        return CompatErrorEvent

    def responses(self, kinds: Iterable[type[LoraplexError]]) -> Iterable[ResponseDoc]:
        return by_status(row for kind in kinds for row in _rows(kind))

    def events(self, error: LoraplexError) -> tuple[msgspec.Struct, ...]:
        return (CompatErrorEvent(CompatEventDetail(error.message)),)


def _rows(kind: type[LoraplexError]) -> Iterable[tuple[int, Media | None]]:
    if issubclass(kind, UnauthenticatedError):
        return ((401, None),)
    shapes = ((status, Media(TEXT)) for status in SHAPE_STATUSES)
    return ((500, Media(JSON, CompatError)), *shapes)
