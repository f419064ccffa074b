"""Tenant of a request, for telemetry."""

from collections.abc import Mapping

from loraplex.core.errors import LoraplexError
from loraplex.core.principal import Principal
from loraplex.frontends.access import Authenticate
from loraplex.serving.wire_request import note_error, note_tenant


def noting_tenant(authenticate: Authenticate) -> Authenticate:
    """Wrap authenticate so that the current request records its tenant or the error."""

    def authenticated(headers: Mapping[str, str]) -> Principal:
        try:
            principal = authenticate(headers)
        except LoraplexError as error:
            note_error(error)
            raise
        note_tenant(principal.tenant)
        return principal

    return authenticated
