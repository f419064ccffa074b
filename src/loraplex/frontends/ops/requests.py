"""GET /v1/requests: the newest requests of a tenant, with the phases of each."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import InvalidParameterError
from loraplex.core.principal import Principal
from loraplex.frontends.access import Authenticate, principal_of
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openapi.operation import OF_KEYS, Parameter, described, json_of
from loraplex.frontends.ops.frontend_numbers import OtherFrontends
from loraplex.frontends.ops.responses import json_response, number, responding_to_errors
from loraplex.frontends.telemetry.recent_requests import (
    RecentRequest,
    RecentRequests,
    RequestKind,
    RequestPage,
    RequestQuery,
)
from loraplex.frontends.telemetry.telemetry import Telemetry

_DEFAULT_LIMIT: Final = 100
_MAX_LIMIT: Final = 1000
_MAX_TEXT: Final = 256
_LIMIT = Parameter(
    "limit",
    f"At most so many that ended, and as many open ones; {_DEFAULT_LIMIT} if it is absent.",
    {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT},
)
_AFTER = Parameter(
    "after",
    "`next` of an earlier response: only requests that ended later, and of those the first.",
    {"type": "integer", "minimum": 0, "maximum": 2**53},
)
_TEXT = {"type": "string", "maxLength": _MAX_TEXT}
_ADAPTER = Parameter(
    "adapter", "Only with or about this adapter; empty: only without adapters.", _TEXT
)
_STATUS = Parameter(
    "status", "Only `open` ones, `ok`, `error`, or those with this status of HTTP or gRPC.", _TEXT
)
_MODEL = Parameter("model", "Only with this base model.", _TEXT)
_KIND = Parameter(
    "kind",
    "`adapter`: only loads, changes and descriptions of adapters, and uploads; `generation`: only "
    "others.",
    {"enum": [*RequestKind]},
)
_TENANT = Parameter("tenant", "Only of this tenant; operators only. Absent: of all.", _TEXT)


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    requests: list[RecentRequest]
    """Requests that ended, the newest last."""
    open: list[RecentRequest]
    """The newest open requests that generate, the newest last."""
    num_open: int
    next: int
    """`after` of the next request."""
    is_complete: bool
    """False: a front-end process did not reply in time, and its requests are missing."""


class RequestEndpoint:
    """GET /v1/requests."""

    def __init__(
        self,
        telemetry: Telemetry,
        recent: RecentRequests,
        authenticate: Authenticate,
        others: OtherFrontends,
    ) -> None:
        """others: processes that keep requests, too."""
        self._telemetry = telemetry
        self._recent = recent
        self._authenticate = authenticate
        self._others = others

    def route(self) -> RecordedRoute:
        return RecordedRoute("/v1/requests", responding_to_errors(self.requests), methods=["GET"])

    @described(
        json_of(RequestList),
        tag="requests",
        query=(_AFTER, _LIMIT, _ADAPTER, _MODEL, _KIND, _STATUS, _TENANT),
        errors=(*OF_KEYS, InvalidParameterError),
    )
    async def requests(self, request: Request) -> Response:
        """The newest requests of the caller's tenant, open and ended, with the time of each phase.

        Operators see those of all tenants. Requests that neither generate, nor change an adapter,
        nor fail are left out.
        """
        query = self._query(request, principal_of(request.scope, self._authenticate))
        pages = [self._recent.page(query, self._telemetry.open_requests)]
        replies = await self._others.requests(msgspec.json.encode(query))
        pages += [_DECODER.decode(reply) for reply in replies if reply]
        page = RequestPage.joined(pages, query)
        is_cut = query.after is not None and len(page.ended) == query.limit
        return json_response(
            {
                "requests": [data for _, data in page.ended],
                "open": [data for _, data in page.open],
                "num_open": page.num_open,
                "next": page.ended[-1][0] if is_cut else query.until,
                "is_complete": all(replies),
            }
        )

    def _query(self, request: Request, principal: Principal) -> RequestQuery:
        given = request.query_params
        for name in ("adapter", "model", "status", "tenant"):
            if len(given.get(name, "")) > _MAX_TEXT:
                raise InvalidParameterError(
                    f"{name} must have at most {_MAX_TEXT} characters", param=name
                )
        tenant = given.get("tenant")
        if tenant != principal.tenant:
            if tenant is not None:
                principal.require_operator("see the requests of another tenant")
            elif not principal.rights.operator:
                tenant = principal.tenant
        limit = number(given.get("limit"), _LIMIT)
        kind = given.get("kind")
        if kind is not None and kind not in tuple(RequestKind):
            raise InvalidParameterError(
                f"kind must be one of {', '.join(RequestKind)}, got {kind[:64]!r}", param="kind"
            )
        return RequestQuery(
            until=self._recent.now(),
            limit=_DEFAULT_LIMIT if limit is None else limit,
            after=number(given.get("after"), _AFTER),
            tenant=tenant,
            adapter=given.get("adapter"),
            status=given.get("status"),
            model=given.get("model"),
            kind=None if kind is None else RequestKind(kind),
        )


_DECODER: Final = msgspec.json.Decoder(RequestPage)
