"""The current request, in contexts that come and go."""

import contextvars

from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import as_current, current_request


def test_inside_and_outside():
    telemetry = Telemetry()
    one, two = (telemetry.begin("http", "GET", path, "", {}) for path in ("/1", "/2"))
    with as_current(one):
        with as_current(two):
            assert current_request() is two
        assert current_request() is one
    assert current_request() is None


def test_a_generator_that_another_context_closes():
    """Asyncio closes an abandoned generator in another context."""
    request = Telemetry().begin("grpc", "", "/Watch", "", {})

    def watch():
        with as_current(request):
            yield current_request()

    watching = watch()
    assert contextvars.copy_context().run(next, watching) is request
    contextvars.copy_context().run(watching.close)
    assert current_request() is None


def test_a_trace_is_made_once_and_shared_with_those_within():
    telemetry = Telemetry()
    request, other = (telemetry.begin("grpc", "", "/s/M", "", {}) for _ in range(2))
    within = request.within()
    assert within.trace is request.trace is request.within().trace
    assert other.trace.trace_id != request.trace.trace_id


def test_its_headers_are_not_shown_where_it_is():
    headers = {"authorization": "Bearer sk-secret"}
    request = Telemetry().begin("http", "GET", "/v1/models", "", headers)
    assert "/v1/models" in repr(request)
    assert "secret" not in repr(request)
