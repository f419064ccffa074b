"""Responses of the operators' routes: JSON, for errors too."""

import functools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import (
    BodyTimeoutError,
    CapacityError,
    ErrorInfo,
    InvalidParameterError,
    LoraplexError,
    ModelNotFoundError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RateLimitedError,
    RequestError,
    StorageFullError,
    UnauthenticatedError,
    passing_error,
)
from loraplex.frontends.access import Authenticate, principal_of
from loraplex.frontends.openapi.operation import (
    JSON,
    Media,
    Parameter,
    ResponseDoc,
    by_status,
    with_error_responses,
)
from loraplex.serving.wire_request import note_error

STATUSES: tuple[tuple[type[LoraplexError], int], ...] = (
    (UnauthenticatedError, 401),
    (PermissionDeniedError, 403),
    (ModelNotFoundError, 404),
    (BodyTimeoutError, 408),
    (PayloadTooLargeError, 413),
    (RequestError, 400),
    (RateLimitedError, 429),
    (StorageFullError, 507),
    (CapacityError, 503),
    (LoraplexError, 500),
)
"""The first class that fits counts."""

Handler = Callable[[Request], Awaitable[Response]]


class Failure(msgspec.Struct, frozen=True):
    error: ErrorInfo


class Refusal(msgspec.Struct, frozen=True):
    """Error for a client without a valid key."""

    error: dict[str, str | None]


def for_operators(handler: Handler, authenticate: Authenticate) -> Handler:
    """Allow a handler to operators only: it shows all tenants."""

    @functools.wraps(handler)
    async def respond(request: Request) -> Response:
        principal_of(request.scope, authenticate).require_operator("see what the server does")
        return await handler(request)

    return respond


def responding_to_errors(handler: Handler) -> Handler:
    """Let a handler raise errors of core.errors, and respond to them."""

    @functools.wraps(handler)
    async def respond(request: Request) -> Response:
        try:
            return await handler(request)
        except (LoraplexError, OSError) as raised:
            error = passing_error(raised) or raised
            if not isinstance(error, LoraplexError):
                raise
            note_error(error)
            return json_response(Failure(error.to_info()), _status(type(error)))

    return with_error_responses(respond, error_responses)


def _status(kind: type[LoraplexError]) -> int:
    return next(status for cls, status in STATUSES if issubclass(kind, cls))


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_responses(kinds: Iterable[type[LoraplexError]]) -> Iterable[ResponseDoc]:
    """Describe the responses of responding_to_errors to these errors."""
    return by_status((_status(kind), Media(JSON, _shape(kind))) for kind in kinds)


def _shape(kind: type[LoraplexError]) -> type[msgspec.Struct]:
    return Refusal if issubclass(kind, UnauthenticatedError) else Failure


def guard_responses(kinds: Iterable[type[LoraplexError]]) -> Iterable[ResponseDoc]:
    """Describe the responses of the guard of an app that raises no errors itself."""
    return by_status((_status(kind), Media(JSON, Refusal)) for kind in kinds)


def number(text: str | None, parameter: Parameter) -> int | None:
    """Return the value of a parameter; None: it is absent."""
    if text is None:
        return None
    least, most = parameter.schema["minimum"], parameter.schema["maximum"]
    # isdecimal alone would take other scripts' digits, and any number of them.
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not least <= value <= most:
        raise InvalidParameterError(
            f"{parameter.name} must be a whole number in [{least}, {most}], got {text!r}",
            param=parameter.name,
        )
    return value
