"""Requests on a wire, for tests of what is done on their behalf."""

from contextlib import AbstractContextManager

from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import as_current


def of_tenant(tenant: str) -> AbstractContextManager[None]:
    """Return a context whose work belongs to a request of the tenant."""
    request = Telemetry().begin("http", "POST", "/v1/completions", "127.0.0.1", {})
    request.tenant = tenant
    return as_current(request)
