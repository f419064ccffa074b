"""A vector is computed anew at another server."""

import msgspec

from loraplex.core.task import Pool
from loraplex.serving.continuation import Continuation, Unrecorded
from support.engine_requests import engine_request


def test_a_vector_is_not_recorded():
    parts, submitted = [], []
    request = msgspec.structs.replace(engine_request((1, 2)), task=Pool())
    found, _ = Continuation(parts.append).begin(request, submitted.append)
    assert found == request
    assert submitted == [request]
    assert [type(part) for part in parts] == [Unrecorded]
    assert "vector" in parts[0].reason
