"""Description of a route: its handler is decorated with it, and `document` reads it."""

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.errors import (
    AdapterNotFoundError,
    BodyTimeoutError,
    CapacityError,
    InternalError,
    InvalidParameterError,
    InvalidRequestError,
    LoraplexError,
    ModelNotFoundError,
    NotReadyError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RequestError,
    UnauthenticatedError,
    UnsupportedFeatureError,
    leaves,
)

Handler = TypeVar("Handler", bound=Callable[..., Any])
ErrorKinds = tuple[type[LoraplexError], ...]

JSON = "application/json"
TEXT = "text/plain"
EVENTS = "text/event-stream"

ANY_ERROR: ErrorKinds = (
    *leaves(RequestError),
    *leaves(CapacityError),
    InternalError,
    *leaves(InternalError),
)
"""Errors of a route that needs an engine or the adapter store."""
OF_READING: ErrorKinds = (InvalidRequestError, InternalError)
"""Errors of every route."""
OF_KEYS: ErrorKinds = (UnauthenticatedError, PermissionDeniedError)
OF_BODIES: ErrorKinds = (
    *(InvalidRequestError, InvalidParameterError, UnsupportedFeatureError),
    *(PayloadTooLargeError, BodyTimeoutError),
)
OF_NAMES: ErrorKinds = (
    *(InvalidParameterError, ModelNotFoundError, AdapterNotFoundError),
    *(PermissionDeniedError, NotReadyError),
)
"""Errors of a route that looks for a model or an adapter."""


class Media(msgspec.Struct, frozen=True):
    """One format of a body."""

    media_type: str
    schema: Any = None
    """A pydantic model, a type that msgspec encodes, a JSON schema as a mapping, or None: not
    described. The schema of an event stream is that of each event's data."""
    note: str = ""
    end: str = ""
    """Data of the event that ends an event stream; empty if there is none."""


class ResponseDoc(msgspec.Struct, frozen=True):
    """Description of the responses with one status."""

    status: int
    content: tuple[Media, ...] = ()
    note: str = ""
    """The description; empty: the status's phrase."""

    @property
    def description(self) -> str:
        return self.note or HTTPStatus(self.status).phrase


class Parameter(msgspec.Struct, frozen=True):
    """Query parameter or header."""

    name: str
    note: str
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})
    """A JSON schema."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a route for one method."""

    responses: tuple[ResponseDoc, ...]
    tag: str = ""
    about: str = ""
    """The handler's docstring."""
    body: Media | None = None
    needs_body: bool = True
    query: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    response_headers: tuple[Parameter, ...] = ()
    errors: ErrorKinds = ()
    """Errors in addition to those of every route, of every body, and of keys."""
    is_open: bool = False
    """No key is needed."""
    error_event: Any = None
    """Type of the data of an event that ends a stream with an error."""
    error_responses: Callable[[Iterable[type[LoraplexError]]], Iterable[ResponseDoc]] | None = None
    """The front end's format of errors."""


def json_of(schema: Any, status: int = 200, note: str = "") -> ResponseDoc:
    return ResponseDoc(status, (Media(JSON, schema),), note)


def json_of_any(*schemas: Any) -> ResponseDoc:
    """Return the description of a response in one of several forms."""
    return ResponseDoc(200, tuple(Media(JSON, schema) for schema in schemas))


def events_of(schema: Any, end: str = "") -> Media:
    return Media(EVENTS, schema, end=end)


def text(status: int = 200, note: str = "") -> ResponseDoc:
    return ResponseDoc(status, (Media(TEXT),), note)


def json_body(schema: Any) -> Media:
    return Media(JSON, schema)


def described(*responses: ResponseDoc, **fields: Any) -> Callable[[Handler], Handler]:
    """Decorate a handler with an Operation made of these fields and of the handler's docstring."""

    def decorate(handler: Handler) -> Handler:
        about = " ".join((handler.__doc__ or "").split())
        handler.__dict__["operation"] = Operation(responses=responses, about=about, **fields)
        return handler

    return decorate


def operation_of(handler: Callable[..., Any]) -> Operation | None:
    """Return the handler's description, if it is decorated with one."""
    found: Operation | None = getattr(handler, "operation", None)
    return found


def with_error_responses(
    handler: Handler,
    errors: Callable[[Iterable[type[LoraplexError]]], Iterable[ResponseDoc]],
    error_event: Any = None,
    headers: Iterable[Parameter] = (),
) -> Handler:
    """Add to a handler's description what its front end does for all handlers.

    errors: the front end's format of errors. headers: read from every request.
    """
    operation = operation_of(handler)
    if operation is not None:
        handler.__dict__["operation"] = msgspec.structs.replace(
            operation,
            error_responses=errors,
            error_event=error_event,
            headers=(*operation.headers, *headers),
        )
    return handler


class Described:
    """ASGI app with descriptions by method."""

    def __init__(self, app: ASGIApp, operations: Mapping[str, Operation]) -> None:
        self._app = app
        self.operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def by_status(rows: Iterable[tuple[int, Media | None]]) -> tuple[ResponseDoc, ...]:
    """Return one description for each status, in order, with all its formats."""
    forms: dict[int, list[Media]] = {}
    for status, media in rows:
        known = forms.setdefault(status, [])
        if media is not None and media not in known:
            known.append(media)
    return tuple(ResponseDoc(status, tuple(found)) for status, found in sorted(forms.items()))
