"""GET /v1/iterations: requests, tokens and memory of the newest steps of an engine."""

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.stats import StepRecord
from loraplex.frontends.openapi.operation import JSON, Media, Parameter, ResponseDoc
from loraplex.frontends.ops.parameters import number
from loraplex.serving.backend import Backend

DEFAULT_ITERATIONS = 100
MAX_ITERATIONS = 10_000
_MAX_NS = 2**63 - 1
JSON_LINES = "application/x-ndjson"
LIMIT = Parameter(
    "limit",
    f"At most so many; {DEFAULT_ITERATIONS} if it is absent.",
    {"type": "integer", "minimum": 1, "maximum": MAX_ITERATIONS},
)
AFTER_NS = Parameter(
    "after_ns",
    "Only steps whose `start_ns` is greater, and of those the first; the body is then an object.",
    {"type": "integer", "minimum": 0, "maximum": _MAX_NS},
)


class LaterSteps(msgspec.Struct, frozen=True):
    """Steps that started after a time, and the time of the response."""

    now_ns: int
    """Time on the clock of `start_ns`, which has no fixed origin."""
    unix_ns: int
    """The same moment, in nanoseconds since 1970."""
    data: Sequence[StepRecord]
    """Oldest first; the `start_ns` of the last one is the `after_ns` of the next request."""


ITERATIONS = ResponseDoc(200, (Media(JSON, list[StepRecord] | LaterSteps), Media(JSON_LINES)))


def iterations_response(backend: Backend, model: str, request: Request) -> Response:
    """The newest steps of a model, oldest first.

    A JSON array, or JSON lines for a client that accepts them. `limit`: at most so many.
    `after_ns`: an object with the first steps that started later. Raises InvalidParameterError.
    """
    query = request.query_params
    limit = number(query.get("limit"), LIMIT)
    after_ns = number(query.get("after_ns"), AFTER_NS)
    records = backend.model(model).steps(DEFAULT_ITERATIONS if limit is None else limit, after_ns)
    if JSON_LINES in request.headers.get("accept", ""):
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        return Response(lines, media_type=JSON_LINES)
    body = records if after_ns is None else LaterSteps(time.monotonic_ns(), time.time_ns(), records)
    return Response(msgspec.json.encode(body), media_type=JSON)
