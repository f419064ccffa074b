"""The route of a path is the one that trying all of them in turn would find."""

import re
from unittest.mock import AsyncMock

import pytest
from starlette.responses import Response

from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.middleware import PathRouter, RecordedRoute
from support.echo_service import EchoService

NAMES = ["m", "a/b", "infer", "versions/1", "m/versions/2", "stats", "a\nb", "x.y", ""]
OTHERS = ["/v2/", "/v2/models", "/v2/models/", "/v2/nothing", "/v2/models/m/infer/", "/v2/infer"]


GET_POST = ("GET", "POST")


@pytest.fixture(scope="module")
def routes() -> list[RecordedRoute]:
    return kserve_routes(TritonService(EchoService()))


async def found(
    routes: list[RecordedRoute], path: str
) -> tuple[RecordedRoute | None, dict[str, str]]:
    """Return the route that matches and the names in the path."""
    sent = []

    async def send(message):
        sent.append(message)

    # No resource takes it.
    scope = {"type": "http", "method": "TRACE", "path": path, "headers": []}
    await PathRouter(routes)(scope, None, send)
    assert sent[0]["status"] in (404, 405)
    return scope.get("route"), scope.get("path_params", {})


async def test_every_pattern(routes):
    patterns = {re.sub(r":path}", "}", route.path) for route in routes}
    names = {"model", "version", "region", "repository", "path"}
    paths = {pattern.format(**dict.fromkeys(names, name)) for name in NAMES for pattern in patterns}
    for path in sorted(paths.union(OTHERS)):
        first = next(route for route in routes if route.path_regex.match(path))
        assert await found(routes, path) == (first, first.path_regex.match(path).groupdict()), path


async def test_a_path_of_no_route(routes):
    assert await found(routes, "/v1/models") == (None, {})


async def test_more_paths_than_are_kept(routes):
    router = PathRouter(routes)

    async def send(message):
        assert message["type"] != "http.response.start" or message["status"] == 405

    for number in [*range(300), 0]:
        path = f"/v2/models/m{number}/infer"
        scope = {"type": "http", "method": "NONE", "path": path, "headers": []}
        await router(scope, None, send)
        assert scope["path_params"] == {"model": f"m{number}"}


async def test_routes_of_one_path_have_methods_of_their_own():
    async def others(scope, receive, send):
        raise LookupError(scope["method"])

    get, post = (RecordedRoute("/a", Response(method), methods=[method]) for method in GET_POST)
    for method, route in zip(GET_POST, (get, post), strict=True):
        scope = {"type": "http", "method": method, "path": "/a", "headers": []}
        await PathRouter((get, post), others)(scope, None, AsyncMock())
        assert scope["route"] is route
    with pytest.raises(LookupError, match="PUT"):
        await PathRouter((get, post), others)(scope | {"method": "PUT"}, None, AsyncMock())
