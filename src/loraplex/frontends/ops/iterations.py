"""GET /v1/iterations: requests, tokens and memory of the newest steps of an engine."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openapi.operation import Parameter
from loraplex.serving.backend import Backend

DEFAULT_ITERATIONS = 100
MAX_ITERATIONS = 10_000
JSON_LINES = "application/x-ndjson"
LIMIT = Parameter(
    "limit",
    f"At most so many; {DEFAULT_ITERATIONS} if it is absent.",
    {"type": "integer", "minimum": 1, "maximum": MAX_ITERATIONS},
)


def iterations_response(backend: Backend, model: str, request: Request) -> Response:
    """The newest steps of a model, oldest first.

    A JSON array, or JSON lines for a client that accepts them. `limit`: at most so many. Raises
    InvalidParameterError.
    """
    records = backend.model(model).steps(_limit(request.query_params.get("limit")))
    if JSON_LINES in request.headers.get("accept", ""):
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        return Response(lines, media_type=JSON_LINES)
    return Response(msgspec.json.encode(records), media_type="application/json")


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_ITERATIONS
    # isdecimal alone would take other scripts' digits, and any number of them.
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= limit <= MAX_ITERATIONS:
        raise InvalidParameterError(
            f"limit must be a whole number in [1, {MAX_ITERATIONS}], got {text!r}", param="limit"
        )
    return limit
