"""The one ASGI middleware of an HTTP app, the checks that requests pass, and their routes.

Its order: request ids and telemetry, memory of bodies, then the checks of the app inside
(`checked`): host, page, key. Endpoints get their principal from `principal_of`. If a new one
forgets to, it is still not open.
"""

import asyncio
import dataclasses
import functools
import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.errors import (
    InternalError,
    InvalidRequestError,
    LoraplexError,
    NotReadyError,
    PermissionDeniedError,
)
from loraplex.frontends.access import Authenticate, headers_of, principal_of
from loraplex.frontends.body_limits import LEASE, BodyLease, BodyMemory
from loraplex.frontends.direct_writes import DIRECT
from loraplex.frontends.telemetry.telemetry import REQUEST_ID_HEADER, Telemetry
from loraplex.serving.access.tenant_bytes import SMALL_BYTES
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.wire_request import WireRequest, as_current, note_error

Refuse = Callable[[str, LoraplexError], Response]
"""Function from a path and an error to a response in the format of the path's front end."""
Check = Callable[[Scope], None]
"""Function that raises a LoraplexError for a request that is refused."""

CLIENT_CLOSED_REQUEST = "499"
"""Status without a response, as nginx logs it."""
_FAILED = "500"
_UNAVAILABLE = "503"
_EVENTS = b"text/event-stream; charset=utf-8"
_ID = REQUEST_ID_HEADER.encode()
_CACHING, _SNIFFING = b"cache-control", b"x-content-type-options"

_READING = ("GET", "HEAD", "OPTIONS")
_PORT = re.compile(r":[0-9]*\Z")
_SENT_UNASKED = ("", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Source: the CORS-safelisted values of Content-Type in WHATWG's Fetch standard."""
_MAX_ORIGIN = 200

_NOT_FOUND = Response(status_code=404)
_ANY = ""
_MAX_KEPT = 256
"""Paths, each as long as a request line may be."""


class RequestMiddleware:
    """ASGI app around another: records requests, adds headers to their responses, and counts bodies
    until their responses begin, and long responses until they are sent."""

    def __init__(
        self,
        app: ASGIApp,
        telemetry: Telemetry,
        bodies: BodyMemory,
        responses: ResponseMemory,
        refuse: Refuse,
        *,
        is_draining: Callable[[], bool],
    ) -> None:
        """refuse: makes the response in place of one that takes too much memory."""
        self._app = app
        self._telemetry = telemetry
        self._bodies = bodies
        self._new_response = functools.partial(_Response, responses, refuse, is_draining)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client, method = scope.get("client"), scope["method"]
        request = self._telemetry.begin(
            "http", method, scope["path"], client[0] if client else "", headers_of(scope)
        )
        scope.setdefault("state", {})["request_id"] = request.request_id
        lease = scope[LEASE] = BodyLease(self._bodies)
        response = self._new_response(scope, receive, send, request, lease)
        status = _FAILED
        try:
            with as_current(request):
                counted = receive if method == "GET" else response.receive
                await self._app(scope, counted, response.send)
            status = response.final_status()
        except asyncio.CancelledError:
            status = response.final_status(is_cut=True)
            raise
        except Exception:
            request.error = InternalError("no front end handled it")
            raise
        finally:
            response.release()
            # Empty if no RecordedRoute matched.
            request.route = str(getattr(scope.get("route"), "path", ""))
            request.end(status)


@dataclasses.dataclass(slots=True, eq=False)
class _Response:
    """Response being sent: adds the headers that every response has, and keeps the status.

    Its length counts, unless its request has reserved memory for it.
    """

    _responses: ResponseMemory
    _refuse: Refuse
    _is_draining: Callable[[], bool]
    _scope: Scope
    _receive: Receive
    _send: Send
    _request: WireRequest
    _lease: BodyLease
    _num_bytes: int = 0
    _tenant: str = ""
    _is_refused: bool = False
    _is_stream: bool = False
    status: str = ""

    async def receive(self) -> Message:
        """Receive a part of the request's body, and count it."""
        message = await self._receive()
        self._lease.take(len(message.get("body", b"")))
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if self._is_refused:
            return _nothing()
        if message["type"] != "http.response.start":
            return self._send(message)
        self._lease.release()
        try:
            self._take(message)
        except NotReadyError as error:
            note_error(error)
            self._is_refused = True
            self._scope.pop(DIRECT, None)
            response = self._refuse(self._scope["path"], error)
            # A page of another origin must see why it was refused.
            response.raw_headers += filter(_is_of_cors, message.get("headers", ()))
            return response(self._scope, self._receive, self._begin)
        return self._begin(message)

    def _begin(self, message: Message) -> Awaitable[None]:
        if message["type"] != "http.response.start":
            return self._send(message)
        self.status = str(message["status"])
        headers = [*message.get("headers", ())]
        self._is_stream = (b"content-type", _EVENTS) in headers
        names = [name for name, _ in headers]  # in lower case, as ASGI has them
        if _ID not in names:
            headers.append((_ID, self._request.request_id.encode()))
        # Nothing is to keep a copy of data, or to take it for another type.
        if _CACHING not in names:
            headers.append((_CACHING, b"no-store"))
        if _SNIFFING not in names:
            headers.append((_SNIFFING, b"nosniff"))
        # The next request is to find another server.
        if self._is_draining() and b"connection" not in names:
            headers.append((b"connection", b"close"))
        return self._send({**message, "headers": headers})

    def _take(self, message: Message) -> None:
        """Count the response's length, if it is long. Raises NotReadyError."""
        found = [value for name, value in message.get("headers", ()) if name == b"content-length"]
        num_bytes = int(found[0]) if found else 0
        if num_bytes > SMALL_BYTES and not self._request.num_response_bytes:
            self._responses.take(self._request.tenant, num_bytes)
            self._tenant, self._num_bytes = self._request.tenant, num_bytes

    def final_status(self, *, is_cut: bool = False) -> str:
        """Return the status that logs and metrics have: a stream that ends with an error began with
        status 200. is_cut: the server or the client ended it before its end."""
        if is_cut and self._is_draining():
            return _UNAVAILABLE
        if is_cut or not self.status:
            return CLIENT_CLOSED_REQUEST
        if self._is_stream and self._request.error is not None:
            return str(self._refuse(self._scope["path"], self._request.error).status_code)
        return self.status

    def release(self) -> None:
        """Count neither body any more."""
        self._lease.release()
        if self._num_bytes:
            self._responses.release(self._tenant, self._num_bytes)


async def _nothing() -> None:
    """Send nothing more of a response in whose place an error was sent."""


def _is_of_cors(header: tuple[bytes, bytes]) -> bool:
    return header[0] == b"vary" or header[0].startswith(b"access-control-")


def checked(app: ASGIApp, checks: Sequence[Check], refuse: Refuse) -> ASGIApp:
    """Return the app with checks that requests pass first, in their order."""

    def passed(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "lifespan":
            try:
                for check in checks:
                    check(scope)
            except LoraplexError as error:
                note_error(error)
                response = refuse(scope["path"], error)
                if response.status_code == 401:
                    response.headers["www-authenticate"] = "Bearer"
                return response(scope, receive, send)
        return app(scope, receive, send)

    return passed


def host_check(hosts: Collection[str]) -> Check:
    """Return the check that a request names a host under which the app is served.

    A web page whose own name resolves to this machine (DNS rebinding) may send any request here,
    and read the response: for a browser, both are one origin. Such a request has the page's name in
    its header Host. An address in it is no such name.

    hosts: names in addition to those of loopback; `*`: all.
    """
    known = frozenset(host.lower() for host in hosts)

    def check(scope: Scope) -> None:
        host = headers_of(scope).get("host")
        if host is not None and not _is_known(host, known):
            raise InvalidRequestError(
                f"the header Host names {host[:_MAX_ORIGIN]!r}, which this server does not serve: "
                "use localhost or an address, or add the name to the setting allowed_hosts"
            )

    return check


@functools.lru_cache(maxsize=64)
def _is_known(host: str, known: frozenset[str]) -> bool:
    name = _PORT.sub("", host).lower().removesuffix(".")
    if name in known or "*" in known or f".{name}".endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def page_check(origins: Collection[str]) -> Check:
    """Return the check that no web page of another origin changes anything.

    A browser checks beforehand whether a page may send JSON or a key (CORS). What a form can send,
    it sends at once: any web page could use a server without keys on the browser's machine.

    origins: those whose pages may post; `*`: all.
    """
    allowed = frozenset(origins)

    def check(scope: Scope) -> None:
        headers = headers_of(scope)
        origin = headers.get("origin")
        if origin is None or scope.get("method") in _READING or allowed & {origin, "*"}:
            return
        is_own = headers.get("sec-fetch-site") in ("same-origin", "none")
        if is_own or origin.partition("://")[2] == headers.get("host"):
            return
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type in _SENT_UNASKED:
            raise PermissionDeniedError(
                f"a web page of {origin[:_MAX_ORIGIN]!r} may not send this; the operator allows it "
                f"with --cors-origins {origin[:_MAX_ORIGIN]} (cors_origins)"
            )

    return check


def key_check(
    authenticate: Authenticate,
    *,
    open_paths: Collection[str] = (),
    open_pages: Collection[str] = (),
    operators_only_to: str | None = None,
) -> Check:
    """Return the check that a request has a valid API key.

    open_paths: need no key. open_pages: need none to be read. operators_only_to: what only
    operators may do here, as `Principal.require_operator` takes it; None: every valid key will do.
    """

    def check(scope: Scope) -> None:
        path = scope["path"]
        if path in open_paths or (path in open_pages and scope.get("method") in _READING):
            return
        principal = principal_of(scope, authenticate)
        if operators_only_to is not None:
            principal.require_operator(operators_only_to)

    return check


class RecordedRoute(Route):
    """Route that puts itself into the scope of the requests that it matches, as Starlette's does
    not: so the middleware knows the pattern of a path."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **fields: Any) -> None:
        super().__init__(path, endpoint, **fields)
        # A name in a path may have any character, a line break too.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self} if match is not Match.NONE else found


class PathRouter:
    """An ASGI application: of the routes, in their order, the first that has the path and method.

    Other requests are passed to another application: finding a route there takes as long as a
    request here. Most patterns end with a word. A path is held against those that end as it does,
    and against those whose end may be anything. Recent lookups are cached: clients use few paths.
    """

    def __init__(self, routes: Sequence[Route], others: ASGIApp = _NOT_FOUND) -> None:
        self._others = others
        ends = [(_last_part(route.path), route) for route in routes]
        self._by_end = {
            word: tuple(route for end, route in ends if end in (word, _ANY)) for word, _ in ends
        }
        self._with_any_end = self._by_end.get(_ANY, ())
        self._found = functools.lru_cache(_MAX_KEPT)(self._find)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        found = self._found(scope["path"], scope["method"]) if scope["type"] == "http" else None
        if found is None:
            return self._others(scope, receive, send)
        scope["route"], scope["path_params"] = found
        return found[0].app(scope, receive, send)

    def _find(self, path: str, method: str) -> tuple[Route, Mapping[str, str]] | None:
        """Return the route and the path's parameters, which must not be changed."""
        for route in self._by_end.get(path.rpartition("/")[2], self._with_any_end):
            match = route.path_regex.match(path)
            if match is not None and method in (route.methods or (method,)):
                return route, match.groupdict()
        return None


def _last_part(pattern: str) -> str:
    """The last part of a route's pattern; _ANY if a parameter is in it."""
    last = pattern.rpartition("/")[2]
    return _ANY if "{" in last else last
