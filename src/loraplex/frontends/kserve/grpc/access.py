"""Authentication of the gRPC port: without a valid key no RPC begins, except health checks."""

from collections.abc import Callable, Mapping

from loraplex.core.principal import NONE, Principal, Rights
from loraplex.frontends.access import Authenticate

_SERVICE = "/inference.GRPCInferenceService"
OPEN_RPCS = frozenset(
    {
        f"{_SERVICE}/ServerLive",
        f"{_SERVICE}/ServerReady",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }
)
"""RPCs of load balancers. They ignore their messages, so these are not read: see `Calls`."""

_NO_RIGHTS = Principal(
    tenant="", rights=Rights(use=NONE, list=NONE, manage=NONE, models=NONE, operator=False)
)
"""Principal of RPCs without authentication: one that is open by mistake reveals nothing."""


class Authentication:
    """Principal of each RPC. A new RPC requires a key."""

    def __init__(self, authenticate: Authenticate, *, health_is_open: bool = True) -> None:
        self._authenticate = authenticate
        self._open = OPEN_RPCS if health_is_open else frozenset()

    def of(self, rpc: str) -> Callable[[Mapping[str, str]], Principal]:
        """Function from a call's metadata to its principal. It raises UnauthenticatedError."""
        return _anyone if self.is_open(rpc) else self._authenticate

    def is_open(self, rpc: str) -> bool:
        """Return whether an RPC needs no key."""
        return rpc in self._open


def _anyone(metadata: Mapping[str, str]) -> Principal:
    del metadata
    return _NO_RIGHTS
