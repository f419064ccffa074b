"""Authentication: from HTTP headers or gRPC metadata to a Principal."""

from collections.abc import Callable, Mapping

from loraplex.core.errors import UnauthenticatedError
from loraplex.core.principal import LOCAL, Principal
from loraplex.serving.access.api_key_ring import ApiKeys

Authenticate = Callable[[Mapping[str, str]], Principal]
"""Function from headers (HTTP: case-insensitive; gRPC: lower case) to the client's principal.

Raises UnauthenticatedError. It may be called from any thread.
"""


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
