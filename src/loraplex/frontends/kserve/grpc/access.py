"""The door of the gRPC port: without a valid key no RPC is begun, but for those about health."""

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
"""What load balancers ask."""

_NOBODY = Principal(
    tenant="", rights=Rights(use=NONE, list=NONE, manage=NONE, models=NONE, operator=False)
)
"""Who asks where no key is asked for: an RPC that is open by mistake gives nothing away."""


class Door:
    """Whom each RPC serves. An RPC that is new is not open."""

    def __init__(self, authenticate: Authenticate, *, health_is_open: bool = True) -> None:
        self._authenticate = authenticate
        self._open = OPEN_RPCS if health_is_open else frozenset()

    def of(self, rpc: str) -> Callable[[Mapping[str, str]], Principal]:
        """From the metadata of a call of this RPC to who asks. That raises UnauthenticatedError."""
        return _anyone if rpc in self._open else self._authenticate


def _anyone(metadata: Mapping[str, str]) -> Principal:
    del metadata
    return _NOBODY
