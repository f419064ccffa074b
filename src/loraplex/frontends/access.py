"""Authentication: from HTTP headers or gRPC metadata to a Principal, once for each request."""

from collections.abc import Callable, Mapping

from starlette.types import Scope

from loraplex.core.errors import UnauthenticatedError
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.wire_request import current_request

Authenticate = Callable[[Mapping[str, str]], Principal]
"""Function from headers (HTTP: case-insensitive; gRPC: lower case) to the client's principal.

Raises UnauthenticatedError. It may be called from any thread.
"""

_HEADERS, _PRINCIPAL = "loraplex.headers", "loraplex.principal"
"""Keys of an ASGI scope."""


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Return the headers by lower-case name; of a repeated header the first.

    They are decoded once and kept in the ASGI scope.
    """
    headers: Mapping[str, str] | None = scope.get(_HEADERS)
    if headers is None:
        headers = scope[_HEADERS] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return headers


def principal_of(scope: Scope, authenticate: Authenticate) -> Principal:
    """Return the client's principal, which is found once and kept in the ASGI scope.

    The current request records its tenant. Raises UnauthenticatedError.
    """
    principal: Principal | None = scope.get(_PRINCIPAL)
    if principal is None:
        principal = scope[_PRINCIPAL] = authenticate(headers_of(scope))
        if (request := current_request()) is not None:
            request.tenant = principal.tenant
    return principal


_NO_RIGHTS = Principal(
    tenant="", rights=Rights(use=NONE, list=NONE, manage=NONE, models=NONE, operator=False)
)


def without_key(headers: Mapping[str, str]) -> Principal:
    """Return the principal of requests without authentication.

    It has no rights: one that is open by mistake reveals nothing.
    """
    del headers
    return _NO_RIGHTS


def everyone_is_local(headers: Mapping[str, str]) -> Principal:
    """The server without API keys."""
    del headers
    return LOCAL


def by_api_key(keys: ApiKeys) -> Authenticate:
    """Authenticate as OpenAI's clients expect: `Authorization: Bearer KEY`."""

    def authenticate(headers: Mapping[str, str]) -> Principal:
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError(
                "this server needs an API key: send the header 'Authorization: Bearer KEY'"
            )
        return keys.principal(key.strip())

    return authenticate
