"""Headers of an HTTP request, decoded once for all middleware and endpoints."""

from collections.abc import Mapping

from starlette.types import Scope

_KEY = "loraplex.headers"


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Return the headers by lower-case name; of a repeated header the first.

    They are decoded once and kept in the ASGI scope.
    """
    headers: Mapping[str, str] | None = scope.get(_KEY)
    if headers is None:
        headers = scope[_KEY] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return headers
