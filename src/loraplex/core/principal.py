"""Who is asking: the tenant, what it may do, and how much."""

import fnmatch

import msgspec

from loraplex.core.errors import PermissionDeniedError

DEFAULT_TENANT = "default"
"""The server's own: what the configuration names belongs to it, and so does everything on a
server without keys. Other tenants may be allowed its adapters, and nobody else's."""


class Names(msgspec.Struct, frozen=True):
    """Names that a right is given for: shell patterns, where * is any text, slashes too."""

    patterns: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def __bool__(self) -> bool:
        """Whether the right is given for any name at all."""
        return bool(self.patterns)


ALL = Names(("*",))
NONE = Names()


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters are the tenant's own and the server's: nobody reaches another tenant's."""

    use: Names = ALL
    """Adapters that requests may run with."""
    list: Names = ALL
    """Adapters that are shown."""
    manage: Names = ALL
    """Own adapters that may be loaded, replaced and removed."""
    models: Names = ALL
    """Base models that are there for the tenant; of others it learns nothing."""
    operator: bool = True
    """May see what the server does for all, and change its models and settings."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """None means no limit of the tenant's own. A request here has one prompt."""

    requests_per_minute: int | None = None
    """In any 60 seconds."""
    tokens_per_minute: int | None = None
    """In any 60 seconds: of prompts, cached or not, and of answers."""
    max_concurrent_requests: int | None = None
    """Waiting and running."""
    max_prompt_tokens: int | None = None
    max_n: int | None = None
    """Answers that are made for one prompt (n, best_of or the width of a beam)."""


class Principal(msgspec.Struct, frozen=True):
    """An argument of every serving call. Without API keys there is one: `LOCAL`."""

    tenant: str = DEFAULT_TENANT
    rights: Rights = Rights()
    limits: TenantLimits = TenantLimits()
    share_weight: float | None = None
    """How large its share of an engine is; None: as the setting fair_weights says."""

    def require_manages(self) -> None:
        """Raise PermissionDeniedError for who may manage no adapter at all."""
        if not self.rights.manage:
            raise PermissionDeniedError(
                f"tenant {self.tenant!r} may not manage adapters: its keys lack the right 'manage'"
            )

    def require_operator(self, what: str) -> None:
        """Raise PermissionDeniedError unless it is one. what: "see the server's statistics"."""
        if not self.rights.operator:
            raise PermissionDeniedError(
                f"tenant {self.tenant!r} may not {what}: its keys lack the right 'operator'"
            )


LOCAL = Principal()
