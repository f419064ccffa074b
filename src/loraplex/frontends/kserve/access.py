"""Who asks: from HTTP headers or gRPC metadata to a Principal."""

from collections.abc import Callable, Mapping

from loraplex.core.principal import LOCAL, Principal

Authenticate = Callable[[Mapping[str, str]], Principal]
"""From headers (HTTP: case-insensitive; gRPC: lower case) to who asks.

Raises UnauthenticatedError.
"""


def everyone_is_local(headers: Mapping[str, str]) -> Principal:
    """The server without API keys."""
    del headers
    return LOCAL
