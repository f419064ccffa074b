"""Requests on a wire, for tests of what is done on their behalf."""

from loraplex.serving.wire_request import WireRequest, as_current


def of_tenant(tenant: str) -> as_current:
    """Return a context whose work belongs to a request of the tenant."""
    names = dict.fromkeys(("protocol", "method", "path", "client", "request_id"), "")
    request = WireRequest(**names, headers={}, trace_of=None, on_end=None, tenant=tenant)
    return as_current(request)
