"""POST, GET and DELETE /drain: let a server run dry, look how far it is, take requests again.

New requests get a 503 at once, and every readiness route reports false; in-flight requests go on.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    NotReadyError,
    PayloadTooLargeError,
)
from loraplex.frontends.access import Authenticate, principal_of
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openapi.operation import described, json_body, json_of
from loraplex.frontends.ops.responses import json_response, responding_to_errors
from loraplex.serving.draining import Draining, DrainReport

MAX_TIMEOUT_SECONDS = 86_400.0
_MAX_BODY_BYTES = 4096
_TIMEOUT = "timeout_seconds"
_BODY = {
    "type": "object",
    "properties": {
        _TIMEOUT: {
            "description": "Seconds after which in-flight requests are ended; absent: no limit.",
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_SECONDS},
                {"type": "null"},
            ],
        }
    },
    "additionalProperties": False,
}


def drain_routes(draining: Draining, authenticate: Authenticate) -> list[RecordedRoute]:
    """Return the routes, for operators only."""
    endpoints = _DrainEndpoints(draining, authenticate)
    return [
        RecordedRoute("/drain", responding_to_errors(endpoints.begin), methods=["POST"]),
        RecordedRoute("/drain", responding_to_errors(endpoints.report), methods=["GET"]),
        RecordedRoute("/drain", responding_to_errors(endpoints.cancel), methods=["DELETE"]),
    ]


class _DrainEndpoints:
    def __init__(self, draining: Draining, authenticate: Authenticate) -> None:
        self._draining = draining
        self._authenticate = authenticate

    @described(
        json_of(DrainReport, 200, "No request is in flight."),
        json_of(DrainReport, 202, "Requests are in flight."),
        tag="operations",
        body=json_body(_BODY),
        needs_body=False,
    )
    async def begin(self, request: Request) -> Response:
        """Accept no more requests; in-flight requests go on."""
        self._check_operator(request)
        timeout_seconds = _timeout(await _body(request))
        return _respond(self._draining.begin(timeout_seconds))

    @described(json_of(DrainReport), tag="operations")
    async def report(self, request: Request) -> Response:
        """How far a drain has come."""
        self._check_operator(request)
        return json_response(self._draining.report())

    @described(json_of(DrainReport), tag="operations", errors=(NotReadyError,))
    async def cancel(self, request: Request) -> Response:
        """Take requests again. A server that stops does not."""
        self._check_operator(request)
        return json_response(self._draining.cancel())

    def _check_operator(self, request: Request) -> None:
        principal_of(request.scope, self._authenticate).require_operator("drain the server")


def _respond(report: DrainReport) -> Response:
    return json_response(report, 200 if report.drained else 202)


async def _body(request: Request) -> dict[str, Any]:
    """Empty, or an object with timeout_seconds."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise PayloadTooLargeError(f"the request body must not exceed {_MAX_BODY_BYTES} bytes")
    try:
        body = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict) or set(body) - {_TIMEOUT}:
        raise InvalidRequestError(
            f'the request body must be empty, or an object as {{"{_TIMEOUT}": 60}}'
        )
    return body


def _timeout(body: dict[str, Any]) -> float | None:
    """None: as long as it takes."""
    seconds = body.get(_TIMEOUT)
    if seconds is None:
        return None
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidParameterError(
            f"{_TIMEOUT} must be a number from 0 to {MAX_TIMEOUT_SECONDS:g}, got {seconds!r:.40}",
            param=_TIMEOUT,
        )
    return float(seconds)
