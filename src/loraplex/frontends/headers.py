"""The headers of an HTTP request, for all who look into them before and behind its door."""

from collections.abc import Mapping

from starlette.types import Scope

_KEY = "loraplex.headers"


def headers_of(scope: Scope) -> Mapping[str, str]:
    """By lower-case name; of a header that was sent several times the first. They are read once a
    request: its ASGI scope keeps them."""
    headers: Mapping[str, str] | None = scope.get(_KEY)
    if headers is None:
        headers = scope[_KEY] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return headers
