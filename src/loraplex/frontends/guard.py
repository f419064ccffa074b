"""Guards of an HTTP port: requests need a valid key, pages of other origins may not post.

Endpoints authenticate again. If a new one forgets to, it is still not open.
"""

import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.errors import InvalidRequestError, LoraplexError, PermissionDeniedError
from loraplex.frontends.access import Authenticate
from loraplex.frontends.headers import headers_of
from loraplex.serving.wire_request import note_error

Refuse = Callable[[str, LoraplexError], Response]
"""Function from a path and an error to a response in the format of the path's front end."""


_READING = ("GET", "HEAD", "OPTIONS")


class KeyGuard:
    """ASGI app around another, which it protects by API keys."""

    def __init__(
        self,
        app: ASGIApp,
        authenticate: Authenticate,
        refuse: Refuse,
        *,
        open_paths: Collection[str] = (),
        open_pages: Collection[str] = (),
        operators_only_to: str | None = None,
    ) -> None:
        """Create a guard.

        open_paths: need no key. open_pages: need none to be read. operators_only_to: what only
        operators may do here, as `Principal.require_operator` takes it; None: every valid key will
        do.
        """
        self._app = app
        self._authenticate = authenticate
        self._refuse = refuse
        self._open_paths = frozenset(open_paths)
        self._open_pages = frozenset(open_pages)
        self._operators_only_to = operators_only_to

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "lifespan" and not self._is_open(scope):
            try:
                principal = self._authenticate(headers_of(scope))
                if self._operators_only_to is not None:
                    principal.require_operator(self._operators_only_to)
            except LoraplexError as error:
                note_error(error)
                response = self._refuse(scope["path"], error)
                if response.status_code == 401:
                    response.headers["www-authenticate"] = "Bearer"
                return response(scope, receive, send)
        return self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return path in self._open_paths or (
            path in self._open_pages and scope.get("method") in _READING
        )


class HostGuard:
    """ASGI app around another, which is served under known host names only.

    A web page whose own name resolves to this machine (DNS rebinding) may send any request here,
    and read the response: for a browser, both are one origin. Such a request has the page's name in
    its header Host. An address in it is no such name.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse, hosts: Collection[str]) -> None:
        """Create a guard. hosts: names in addition to those of loopback; `*`: all."""
        self._app = app
        self._refuse = refuse
        self._hosts = frozenset(host.lower() for host in hosts)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        host = headers_of(scope).get("host") if scope["type"] == "http" else None
        if host is None or self._is_known(host):
            return self._app(scope, receive, send)
        error = InvalidRequestError(
            f"the header Host names {host[:_MAX_ORIGIN]!r}, which this server does not serve: use "
            "localhost or an address, or add the name to the setting allowed_hosts"
        )
        note_error(error)
        return self._refuse(scope["path"], error)(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        name = _PORT.sub("", host).lower().removesuffix(".")
        if name in self._hosts or "*" in self._hosts or f".{name}".endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


_PORT = re.compile(r":[0-9]*\Z")
_SENT_UNASKED = ("", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Source: the CORS-safelisted values of Content-Type in WHATWG's Fetch standard."""
_MAX_ORIGIN = 200


class PageGuard:
    """ASGI app around another, which web pages of other origins cannot change.

    A browser checks beforehand whether a page may send JSON or a key (CORS). What a form can send,
    it sends at once: any web page could use a server without keys on the browser's machine.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse, origins: Collection[str]) -> None:
        """Create a guard. origins: those whose pages may post; `*`: all."""
        self._app = app
        self._refuse = refuse
        self._origins = frozenset(origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["method"] in _READING:
            return self._app(scope, receive, send)
        headers = headers_of(scope)
        if not self._is_strangers(headers):
            return self._app(scope, receive, send)
        error = PermissionDeniedError(
            f"a web page of {headers['origin'][:_MAX_ORIGIN]!r} may not send this: the setting "
            "cors_origins names those that may"
        )
        note_error(error)
        return self._refuse(scope["path"], error)(scope, receive, send)

    def _is_strangers(self, headers: Mapping[str, str]) -> bool:
        origin = headers.get("origin")
        if origin is None or not self._origins.isdisjoint((origin, "*")):
            return False
        is_own = headers.get("sec-fetch-site") in ("same-origin", "none")
        if is_own or origin.partition("://")[2] == headers.get("host"):
            return False
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        return media_type in _SENT_UNASKED
