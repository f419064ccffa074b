"""Lookup of a path's route without trying all: some thirty patterns are below /v2."""

import functools
from collections.abc import Awaitable, Mapping, Sequence

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from loraplex.frontends.kserve.http.body import json_response

_ANY = ""
_MAX_KEPT = 256
"""Paths, each as long as a request line may be."""


class PathRouter:
    """An ASGI application: of the routes, in their order, the first whose pattern a path has.

    Most patterns end with a word. A path is held against those that end as it does, and against
    those whose end may be anything. Recent lookups are cached: clients use few paths.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        ends = [(_end(route.path), route) for route in routes]
        self._by_end = {
            word: tuple(route for end, route in ends if end in (word, _ANY)) for word, _ in ends
        }
        self._with_any_end = self._by_end.get(_ANY, ())
        self._found = functools.lru_cache(_MAX_KEPT)(self._find)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        found = self._found(scope["path"])
        if found is None:
            return json_response({"error": "Not Found"}, 404)(scope, receive, send)
        scope["route"], scope["path_params"] = found
        return found[0].app(scope, receive, send)

    def _find(self, path: str) -> tuple[Route, Mapping[str, str]] | None:
        """The route and the path's parameters, which must not be changed."""
        for route in self._by_end.get(path.rpartition("/")[2], self._with_any_end):
            match = route.path_regex.match(path)
            if match is not None:
                return route, match.groupdict()
        return None


def _end(pattern: str) -> str:
    """The last part of a route's pattern; _ANY if a parameter is in it."""
    last = pattern.rpartition("/")[2]
    return _ANY if "{" in last else last
