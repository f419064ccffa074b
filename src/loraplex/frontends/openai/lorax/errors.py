"""How LoRAX tells an error: a text and its kind."""

import msgspec
from starlette.responses import Response

from loraplex.core.errors import LoraplexError
from loraplex.frontends.openai.errors import error_response, wire_error


class ErrorText(msgspec.Struct, frozen=True):
    error: str
    error_type: str


class LoraxErrors:
    """Statuses are those of the OpenAI routes, but a wrong field is 422."""

    def response(self, error: LoraplexError) -> Response:
        response = error_response(error)
        status = 422 if response.status_code == 400 else response.status_code
        headers = {
            name: value
            for name, value in response.headers.items()
            if name in ("retry-after", "connection")
        }
        return Response(msgspec.json.encode(_text(error)), status, headers, "application/json")

    def events(self, error: LoraplexError) -> tuple[ErrorText, ...]:
        return (_text(error),)


def _text(error: LoraplexError) -> ErrorText:
    status = wire_error(error).status
    if status in (429, 503):
        return ErrorText(error.message, "overloaded")
    return ErrorText(error.message, "validation" if status < 500 else "generation")


LORAX_ERRORS = LoraxErrors()
