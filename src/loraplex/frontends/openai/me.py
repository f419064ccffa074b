"""GET /v1/me: the sender of the request, and what its key allows."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loraplex.adapters.uploads import UPLOADED_NAMES
from loraplex.core.principal import Principal, Rights, TenantLimits, TenantUsage
from loraplex.core.version import __version__
from loraplex.frontends.openai.context import OpenAIContext, json_response
from loraplex.frontends.openapi.operation import OF_KEYS, described, json_of


class RightsEntry(Struct, frozen=True):
    """Patterns of the names that a right applies to; * is any text, an empty list is no right."""

    use: tuple[str, ...]
    """Adapters that requests may use."""
    list: tuple[str, ...]
    """Adapters that are listed."""
    manage: tuple[str, ...]
    """Own adapters that may be loaded, replaced and removed."""
    models: tuple[str, ...]
    """Base models that the tenant sees."""


class UploadLimit(Struct, frozen=True):
    max_bytes: int
    """Maximum size of one upload."""
    files: tuple[str, ...]
    """Names that its files may have."""


class Me(Struct, frozen=True, kw_only=True):
    tenant: str
    has_keys: bool
    """Whether the server requires API keys."""
    operator: bool
    """Whether the key sees all tenants."""
    rights: RightsEntry
    limits: TenantLimits
    """Limits of the tenant; null is no limit."""
    usage: TenantUsage
    uploads: UploadLimit | None
    """Limits of uploads of adapters; null if the server takes none."""
    version: str
    """Version of the server."""


class MeEndpoints:
    """GET /v1/me."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(json_of(Me), tag="tenants", errors=OF_KEYS)
    async def me(self, request: Request) -> Response:
        """The tenant of the key, with its rights, its limits, and how much of them it uses."""
        principal = self._context.principal(request)
        return json_response(self._of(principal))

    def _of(self, principal: Principal) -> Me:
        uploads = self._context.backend.uploads
        return Me(
            tenant=principal.tenant,
            has_keys=self._context.options.has_keys,
            operator=principal.rights.operator,
            rights=_entry(principal.rights),
            limits=principal.limits,
            usage=self._context.backend.usage(principal),
            uploads=None if uploads is None else UploadLimit(uploads.max_bytes, UPLOADED_NAMES),
            version=__version__,
        )


def _entry(rights: Rights) -> RightsEntry:
    return RightsEntry(
        rights.use.patterns, rights.list.patterns, rights.manage.patterns, rights.models.patterns
    )
