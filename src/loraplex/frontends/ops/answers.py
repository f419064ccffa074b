"""How the operators' routes answer: JSON, errors too."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import (
    BodyTimeoutError,
    CapacityError,
    LoraplexError,
    ModelNotFoundError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RateLimitedError,
    RequestError,
    UnauthenticatedError,
)
from loraplex.frontends.access import Authenticate
from loraplex.serving.wire_request import note_error

STATUSES: tuple[tuple[type[LoraplexError], int], ...] = (
    (UnauthenticatedError, 401),
    (PermissionDeniedError, 403),
    (ModelNotFoundError, 404),
    (BodyTimeoutError, 408),
    (PayloadTooLargeError, 413),
    (RequestError, 400),
    (RateLimitedError, 429),
    (CapacityError, 503),
    (LoraplexError, 500),
)
"""The first class that fits counts."""

Handler = Callable[[Request], Awaitable[Response]]


def for_operators(handler: Handler, authenticate: Authenticate) -> Handler:
    """Only they may ask: it tells of all tenants."""

    async def answer(request: Request) -> Response:
        authenticate(request.headers).require_operator("see what the server does")
        return await handler(request)

    return answer


def answers_errors(handler: Handler) -> Handler:
    """Let a handler raise errors of core.errors."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except LoraplexError as error:
            note_error(error)
            status = next(status for cls, status in STATUSES if isinstance(error, cls))
            return json_answer({"error": error.to_info()}, status)

    return answer


def json_answer(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
