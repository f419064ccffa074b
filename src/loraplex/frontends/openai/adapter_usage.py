"""/v1/usage: what tenants had of each adapter."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import InvalidParameterError
from loraplex.core.principal import Principal
from loraplex.frontends.openai.adapter_queries import AFTER, LIMIT, limit
from loraplex.frontends.openai.adapter_schema import UsageEntry, UsageList
from loraplex.frontends.openai.context import OpenAIContext, json_response
from loraplex.frontends.openapi.operation import OF_NAMES, Parameter, described, json_of
from loraplex.serving.adapter_usage import UsageCount, UsedAdapter
from loraplex.serving.cursors import cursor_of, place_of

_ALL: Final = "*"
_BY: Final = Parameter("by", "What the use is divided by.", {"enum": ["adapter"]})
_TENANT: Final = Parameter(
    "tenant", f"Tenant, for operators; {_ALL} is every tenant. The own one if it is absent."
)
_ADAPTER: Final = Parameter("adapter", "Only the adapter of this name.")
_SERIES: Final = Parameter(
    "series", "Return also the last 60 minutes, all listed adapters together.", {"enum": ["minute"]}
)


class _UsagePlace(NamedTuple):
    tenant: str
    used: UsedAdapter


class UsageEndpoints:
    def __init__(self, context: OpenAIContext) -> None:
        self._context = context
        self._usage = context.backend.adapter_usage

    @described(
        json_of(UsageList),
        query=(_BY, _TENANT, _ADAPTER, _SERIES, AFTER, LIMIT),
        tag="adapters",
        errors=OF_NAMES,
    )
    async def usage(self, request: Request) -> Response:
        """Requests, errors and tokens by adapter, of requests that ended since the start."""
        query = request.query_params
        principal = self._context.principal(request)
        if query.get("by", "adapter") != "adapter":
            raise InvalidParameterError(f"by must be adapter, got {query['by'][:64]!r}", param="by")
        if query.get("series", "minute") != "minute":
            given = query["series"][:64]
            raise InvalidParameterError(f"series must be minute, got {given!r}", param="series")
        name = query.get("adapter")
        tenants, most = self._tenants(principal, query.get("tenant")), limit(query)
        after = place_of(query["after"], _UsagePlace) if "after" in query else None
        found = list(itertools.islice(self._rows(tenants, name, after), most + 1))
        other = UsageCount()
        for tenant in tenants:
            other.add(self._usage.others_of(tenant))
        return json_response(
            UsageList(
                data=[_entry(place, count) for place, count in found[:most]],
                other=other,
                since=self._usage.since,
                next=cursor_of(found[most - 1][0]) if len(found) > most else None,
                series=(
                    self._usage.minutes(tenants, lambda used: _is_of(used, name))
                    if "series" in query
                    else UNSET
                ),
            )
        )

    def _tenants(self, principal: Principal, tenant: str | None) -> Sequence[str]:
        if tenant is None or tenant == principal.tenant:
            return (principal.tenant,)
        principal.require_operator("see what other tenants use")
        return self._usage.tenants if tenant == _ALL else (tenant,)

    def _rows(
        self, tenants: Sequence[str], name: str | None, after: _UsagePlace | None
    ) -> Iterator[tuple[_UsagePlace, UsageCount]]:
        """Yield counts by tenant and adapter, in order; only as many are sorted as are taken."""
        for tenant in tenants:
            if after is not None and tenant < after.tenant:
                continue
            counts = self._usage.of_tenant(tenant)
            for used in sorted(counts):
                if after is not None and _UsagePlace(tenant, used) <= after:
                    continue
                if _is_of(used, name):
                    yield _UsagePlace(tenant, used), counts[used]


def _is_of(used: UsedAdapter, name: str | None) -> bool:
    """Whether a count is of the adapter of this name; None: of any, or of a base model."""
    return name is None or (bool(used.owner) and used.name == name)


def _entry(place: _UsagePlace, count: UsageCount) -> UsageEntry:
    tenant, used = place
    return UsageEntry(
        **msgspec.structs.asdict(count),
        tenant=tenant,
        model=used.model,
        owner=used.owner or None,
        adapter=used.name or None,
    )
