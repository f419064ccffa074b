"""From a path to its route, without trying them all: some thirty patterns are below /v2."""

from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from loraplex.frontends.kserve.http.body import json_response

_ANY = ""


class PathRouter:
    """An ASGI application: of the routes, in their order, the first whose pattern a path has.

    Most patterns end with a word. A path is held against those that end as it does, and against
    those whose end may be anything.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        ends = [(_end(route.path), route) for route in routes]
        self._by_end = {
            word: tuple(route for end, route in ends if end in (word, _ANY)) for word, _ in ends
        }
        self._with_any_end = self._by_end.get(_ANY, ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        for route in self._by_end.get(path.rpartition("/")[2], self._with_any_end):
            found = route.path_regex.match(path)
            if found is not None:
                scope["route"], scope["path_params"] = route, found.groupdict()
                await route.app(scope, receive, send)
                return
        await json_response({"error": "Not Found"}, 404)(scope, receive, send)


def _end(pattern: str) -> str:
    """The last part of a route's pattern; _ANY if a parameter is in it."""
    last = pattern.rpartition("/")[2]
    return _ANY if "{" in last else last
