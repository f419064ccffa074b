"""Errors in LoRAX's form: a text and its kind."""

from collections.abc import Iterable

import msgspec
from starlette.responses import Response

from loraplex.core.errors import LoraplexError, UnauthenticatedError
from loraplex.frontends.openai.errors import ErrorBody, error_response, wire_error, wire_row
from loraplex.frontends.openapi.operation import JSON, Media, ResponseDoc, by_status


class ErrorText(msgspec.Struct, frozen=True):
    error: str
    error_type: str


class LoraxErrors:
    """Statuses are those of the OpenAI routes, but a wrong field is 422."""

    def response(self, error: LoraplexError) -> Response:
        response = error_response(error)
        status = _status(response.status_code)
        headers = {
            name: value
            for name, value in response.headers.items()
            if name in ("retry-after", "connection")
        }
        return Response(msgspec.json.encode(_text(error)), status, headers, "application/json")

    def events(self, error: LoraplexError) -> tuple[ErrorText, ...]:
        return (_text(error),)

    @property
    def event_type(self) -> type[msgspec.Struct]:
        return ErrorText

    def responses(self, kinds: Iterable[type[LoraplexError]]) -> Iterable[ResponseDoc]:
        return by_status((_status(wire_row(kind).status), _media(kind)) for kind in kinds)


def _status(openais: int) -> int:
    return 422 if openais == 400 else openais


def _media(kind: type[LoraplexError]) -> Media:
    """Form of an error: authentication errors have OpenAI's."""
    return Media(JSON, ErrorBody if issubclass(kind, UnauthenticatedError) else ErrorText)


def _text(error: LoraplexError) -> ErrorText:
    status = wire_error(error).status
    if status in (429, 503):
        return ErrorText(error.message, "overloaded")
    return ErrorText(error.message, "validation" if status < 500 else "generation")


LORAX_ERRORS = LoraxErrors()
