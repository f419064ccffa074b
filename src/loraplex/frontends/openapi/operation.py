"""What one route takes and answers: told where its handler is, read by `document`."""

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
"""Of a route that an engine or the adapter store works for."""
OF_READING: ErrorKinds = (InvalidRequestError, InternalError)
"""Of every route."""
OF_KEYS: ErrorKinds = (UnauthenticatedError, PermissionDeniedError)
OF_BODIES: ErrorKinds = (
    *(InvalidRequestError, InvalidParameterError, UnsupportedFeatureError),
    *(PayloadTooLargeError, BodyTimeoutError),
)
OF_NAMES: ErrorKinds = (
    *(InvalidParameterError, ModelNotFoundError, AdapterNotFoundError),
    *(PermissionDeniedError, NotReadyError),
)
"""Of a route that looks for a model or an adapter."""


class Media(msgspec.Struct, frozen=True):
    """One form of a body."""

    media_type: str
    schema: Any = None
    """A pydantic model, a type that msgspec encodes, or a JSON schema as a mapping; None: no more
    is said. Of events: of the data of each."""
    note: str = ""
    end: str = ""
    """Of events: what the last one has instead; empty: there is none of its own."""


class Answer(msgspec.Struct, frozen=True):
    status: int
    content: tuple[Media, ...] = ()
    note: str = ""
    """Empty: the status says it."""

    @property
    def description(self) -> str:
        return self.note or HTTPStatus(self.status).phrase


class Parameter(msgspec.Struct, frozen=True):
    """Of the query, or a header."""

    name: str
    note: str
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})
    """A JSON schema."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    answers: tuple[Answer, ...]
    tag: str = ""
    about: str = ""
    """The handler's docstring."""
    body: Media | None = None
    needs_body: bool = True
    query: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    answer_headers: tuple[Parameter, ...] = ()
    errors: ErrorKinds = ()
    """Beside those that every route has, and every one with a body or a key."""
    is_open: bool = False
    """It asks for no key, if the server's settings do not say otherwise."""
    error_event: Any = None
    """What the data of an event are that ends a stream with an error, as a type."""
    error_answers: Callable[[Iterable[type[LoraplexError]]], Iterable[Answer]] | None = None
    """The room's: how it tells errors."""


def json_of(schema: Any, status: int = 200, note: str = "") -> Answer:
    return Answer(status, (Media(JSON, schema),), note)


def events_of(schema: Any, end: str = "") -> Media:
    return Media(EVENTS, schema, end=end)


def text(status: int = 200, note: str = "") -> Answer:
    return Answer(status, (Media(TEXT),), note)


def json_body(schema: Any) -> Media:
    return Media(JSON, schema)


def described(*answers: Answer, **fields: Any) -> Callable[[Handler], Handler]:
    """Decorates a handler with its operation; fields: of Operation. Its docstring is the text."""

    def told(handler: Handler) -> Handler:
        about = " ".join((handler.__doc__ or "").split())
        handler.__dict__["operation"] = Operation(answers=answers, about=about, **fields)
        return handler

    return told


def operation_of(handler: Callable[..., Any]) -> Operation | None:
    """What `described` was given; None: nothing is told of it."""
    found: Operation | None = getattr(handler, "operation", None)
    return found


def telling_errors(
    handler: Handler,
    errors: Callable[[Iterable[type[LoraplexError]]], Iterable[Answer]],
    error_event: Any = None,
    headers: Iterable[Parameter] = (),
) -> Handler:
    """The handler, which tells its errors so; headers: that its room reads of every request."""
    operation = operation_of(handler)
    if operation is not None:
        handler.__dict__["operation"] = msgspec.structs.replace(
            operation,
            error_answers=errors,
            error_event=error_event,
            headers=(*operation.headers, *headers),
        )
    return handler


class Described:
    """An ASGI app that is a route: what it answers to a method."""

    def __init__(self, app: ASGIApp, operations: Mapping[str, Operation]) -> None:
        self._app = app
        self.operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def by_status(rows: Iterable[tuple[int, Media | None]]) -> tuple[Answer, ...]:
    """One answer for each status, with its forms, in order."""
    forms: dict[int, list[Media]] = {}
    for status, media in rows:
        known = forms.setdefault(status, [])
        if media is not None and media not in known:
            known.append(media)
    return tuple(Answer(status, tuple(found)) for status, found in sorted(forms.items()))
