"""The door of an HTTP port: without a valid key nothing behind it is asked.

Endpoints ask again who it is that they serve. That a new one forgets to does not open it.
"""

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.errors import LoraplexError
from loraplex.frontends.access import Authenticate
from loraplex.serving.wire_request import note_error

Refuse = Callable[[str, LoraplexError], Response]
"""From a path and an error to an answer, in the words of the room that the path belongs to."""


class KeyGuard:
    """An ASGI application around another."""

    def __init__(
        self,
        app: ASGIApp,
        authenticate: Authenticate,
        refuse: Refuse,
        *,
        open_paths: Collection[str] = (),
        operators_only_to: str | None = None,
    ) -> None:
        """open_paths: no key is asked for there. operators_only_to: what only operators may do
        here, as `Principal.require_operator` takes it; None: all with a key come in."""
        self._app = app
        self._authenticate = authenticate
        self._refuse = refuse
        self._open_paths = frozenset(open_paths)
        self._operators_only_to = operators_only_to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                principal = self._authenticate(Headers(scope=scope))
                if self._operators_only_to is not None:
                    principal.require_operator(self._operators_only_to)
            except LoraplexError as error:
                note_error(error)
                response = self._refuse(scope["path"], error)
                if response.status_code == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
