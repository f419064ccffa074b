"""The one table from core.errors to HTTP statuses and OpenAI's error bodies.

Several faults of one request are one error (`joined`), so that a client mends them at once.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from starlette.responses import Response

from loraplex.core import errors
from loraplex.core.errors import RequestError
from loraplex.frontends.openapi.operation import JSON, Media, ResponseDoc, by_status
from loraplex.serving.wire_request import note_error

_log = logging.getLogger(__name__)


class WireError(NamedTuple):
    """HTTP status, OpenAI's error type, and OpenAI's own code where it has one."""

    status: int
    type: str
    code: str | None = None
    """None: the stable code of the error class."""


INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
SERVER = "server_error"

WIRE_ERRORS: dict[type[errors.LoraplexError], WireError] = {
    errors.InvalidRequestError: WireError(400, INVALID),
    errors.InvalidParameterError: WireError(400, INVALID),
    errors.InvalidTensorError: WireError(400, INVALID),
    errors.PromptTooLongError: WireError(400, INVALID, "context_length_exceeded"),
    errors.TokenOutOfVocabularyError: WireError(400, INVALID),
    errors.PayloadTooLargeError: WireError(413, INVALID),
    errors.BodyTimeoutError: WireError(408, INVALID),
    errors.ModelNotFoundError: WireError(404, INVALID),
    errors.AdapterNotFoundError: WireError(404, INVALID),
    errors.ResponseNotFoundError: WireError(404, INVALID),
    errors.UploadNotFoundError: WireError(404, INVALID),
    errors.AdapterExistsError: WireError(409, INVALID),
    errors.InvalidAdapterError: WireError(422, INVALID),
    errors.AdapterMismatchError: WireError(422, INVALID),
    errors.AdapterTooLargeError: WireError(422, INVALID),
    errors.UnsupportedFeatureError: WireError(400, INVALID),
    errors.UnauthenticatedError: WireError(401, "authentication_error", "invalid_api_key"),
    errors.PermissionDeniedError: WireError(403, "permission_error"),
    errors.QueueFullError: WireError(429, "rate_limit_error"),
    errors.RateLimitedError: WireError(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.NotReadyError: WireError(503, UNAVAILABLE),
    errors.EngineRestartedError: WireError(503, UNAVAILABLE),
    errors.AdapterLoadError: WireError(503, UNAVAILABLE),
    errors.StorageFullError: WireError(507, UNAVAILABLE),
    errors.StorageUnavailableError: WireError(503, UNAVAILABLE),
    errors.DeadlineExceededError: WireError(504, "timeout_error"),
    errors.RowFailedError: WireError(500, SERVER),
    errors.StepFailedError: WireError(500, SERVER),
    errors.CrashingRequestError: WireError(500, SERVER),
    errors.UnsupportedModelError: WireError(500, SERVER),
    # The branches, for an error that another process described by a code unknown here.
    errors.RequestError: WireError(400, INVALID),
    errors.CapacityError: WireError(503, UNAVAILABLE),
    errors.LoraplexError: WireError(500, SERVER),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def wire_error(error: errors.LoraplexError) -> WireError:
    """The row of the error's class, or of its nearest ancestor."""
    return wire_row(type(error))


def wire_row(kind: type[errors.LoraplexError]) -> WireError:
    return next(WIRE_ERRORS[cls] for cls in kind.__mro__ if cls in WIRE_ERRORS)


def error_body(error: errors.LoraplexError) -> ErrorBody:
    wire = wire_error(error)
    return ErrorBody(ErrorDetail(error.message, wire.type, error.param, wire.code or error.code))


def error_response(error: errors.LoraplexError) -> Response:
    response = json_error(wire_error(error).status, error_body(error).error)
    if error.retry_after_seconds is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if isinstance(error, errors.PayloadTooLargeError):
        # Some of the body may stay unread, so the connection cannot be used again.
        response.headers["connection"] = "close"
    return response


def json_error(status: int, detail: ErrorDetail) -> Response:
    body = msgspec.json.encode(ErrorBody(detail))
    return Response(body, status_code=status, media_type="application/json")


def as_loraplex_error(error: Exception, request_id: str) -> errors.LoraplexError:
    """The error itself, or for a bug an InternalError that names only where to look."""
    passing = errors.passing_error(error)
    if passing is not None:
        _log.error("request %s failed: %s", request_id, error)
        error = passing
    if not isinstance(error, errors.LoraplexError):
        _log.error("request %s failed", request_id, exc_info=error)
        error = errors.InternalError(
            f"internal error; the server's log has details under request id {request_id}"
        )
    note_error(error)
    return error


class ErrorWriter(Protocol):
    """Form of an error: instead of a response, or at the end of a stream that has begun."""

    def response(self, error: errors.LoraplexError) -> Response: ...

    def events(self, error: errors.LoraplexError) -> Iterable[msgspec.Struct]: ...

    @property
    def event_type(self) -> type[msgspec.Struct]:
        """Type of the events of `events`."""
        ...

    def responses(self, kinds: Iterable[type[errors.LoraplexError]]) -> Iterable[ResponseDoc]:
        """What `response` makes of errors of these kinds, by status."""
        ...


class OpenAIErrors:
    """Errors by the table above, in OpenAI's form."""

    def response(self, error: errors.LoraplexError) -> Response:
        return error_response(error)

    def events(self, error: errors.LoraplexError) -> Iterable[msgspec.Struct]:
        return (error_body(error),)

    @property
    def event_type(self) -> type[msgspec.Struct]:
        return ErrorBody

    def responses(self, kinds: Iterable[type[errors.LoraplexError]]) -> Iterable[ResponseDoc]:
        return by_status((wire_row(kind).status, _BODY) for kind in kinds)


_BODY = Media(JSON, ErrorBody)


OPENAI_ERRORS = OpenAIErrors()


MAX_FAULTS: Final = 10
"""Faults that one error lists."""


def raise_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run every check, and raise one error for all RequestErrors that they raise."""
    raise_errors(list(filter(None, map(_error_of, checks))))


def raise_errors(errors: Sequence[RequestError]) -> None:
    """Raise one error for all of these; none, if there are none."""
    if errors:
        raise joined(errors)


def joined(errors: Sequence[RequestError]) -> RequestError:
    """Return an error of the first one's class and parameter that lists them all."""
    first = errors[0]
    # An error that lists several already has each as a note.
    faults = (getattr(error, "__notes__", None) or [error.message] for error in errors)
    messages = list(dict.fromkeys(itertools.chain.from_iterable(faults)))
    if len(messages) == 1:
        return first
    more = len(messages) - MAX_FAULTS
    listed = "; ".join(f"({n}) {text}" for n, text in enumerate(messages[:MAX_FAULTS], 1))
    rest = f"; and {more} more" if more > 0 else ""
    message = f"the request has {len(messages)} faults: {listed}{rest}"
    error = type(first)(message, param=first.param)
    for text in messages:
        error.add_note(text)
    return error


def _error_of(check: Callable[[], object]) -> RequestError | None:
    try:
        check()
    except RequestError as error:
        return error
    return None
