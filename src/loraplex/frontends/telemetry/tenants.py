"""Whose a request is, for what is told of it."""

from collections.abc import Mapping

from loraplex.core.errors import LoraplexError
from loraplex.core.principal import Principal
from loraplex.frontends.access import Authenticate
from loraplex.serving.wire_request import note_error, note_tenant


def noting_tenant(authenticate: Authenticate) -> Authenticate:
    """The same, and the current request learns whose it is, or why nobody's."""

    def authenticated(headers: Mapping[str, str]) -> Principal:
        try:
            principal = authenticate(headers)
        except LoraplexError as error:
            note_error(error)
            raise
        note_tenant(principal.tenant)
        return principal

    return authenticated
