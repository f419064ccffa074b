"""The sender of a request: its tenant, with rights and limits."""

import fnmatch
import json

import msgspec

from loraplex.core.errors import PermissionDeniedError

DEFAULT_TENANT = "default"
"""The server's own tenant: configured adapters belong to it, and on a server without keys
everything does. Other tenants may use its adapters, if their rights allow it, and no others."""


class Names(msgspec.Struct, frozen=True):
    """Names that a right applies to, as shell patterns: * is any text, slashes included."""

    patterns: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def with_name(self, name: str) -> "Names":
        """Return these names and one more."""
        return Names((*self.patterns, name))

    def __bool__(self) -> bool:
        """Whether the right applies to any name."""
        return bool(self.patterns)


ALL = Names(("*",))
NONE = Names()


def tenant_table(tenant: str) -> str:
    """Return the head of a tenant's table in the file of keys."""
    return f'[tenants."{tenant}"]' if "." in tenant else f"[tenants.{tenant}]"


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """Rights of a tenant, on its own and the server's adapters; it has none on other tenants'."""

    use: Names = ALL
    """Adapters that requests may use."""
    list: Names = ALL
    """Adapters that are listed."""
    manage: Names = ALL
    """Own adapters that may be loaded, replaced and removed."""
    models: Names = ALL
    """Base models that the tenant sees; the others do not exist for it."""
    operator: bool = True
    """Whether the tenant sees statistics of all tenants, and may change models and settings."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a tenant; None is no limit. A request counts once for each of its prompts."""

    requests_per_minute: int | None = None
    """Limit in any 60 seconds."""
    tokens_per_minute: int | None = None
    """Limit in any 60 seconds, for the tokens of prompts, cached or not, and of outputs."""
    max_concurrent_requests: int | None = None
    """Limit of waiting and running requests together."""
    max_prompt_tokens: int | None = None
    max_n: int | None = None
    """Limit of completions made for one prompt (n, best_of or the beam width)."""


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of its limits a tenant uses now; None: without a limit it is not counted."""

    concurrent_requests: int
    """Number of waiting and running requests."""
    requests_last_minute: int | None
    tokens_last_minute: int | None
    """Tokens, with those reserved for outputs of running requests."""


class Principal(msgspec.Struct, frozen=True):
    """The sender of a request; without API keys it is always `LOCAL`."""

    tenant: str = DEFAULT_TENANT
    rights: Rights = Rights()
    limits: TenantLimits = TenantLimits()
    share_weight: float | None = None
    """Weight of its share of an engine; None: that of the setting fair_weights."""

    def require_manages(self) -> None:
        """Raise PermissionDeniedError if the tenant may manage no adapter at all."""
        if not self.rights.manage:
            raise PermissionDeniedError(
                f"tenant {self.tenant!r} may not manage adapters: {self.right_line('manage', ALL)}"
            )

    def require_operator(self, what: str) -> None:
        """Raise PermissionDeniedError unless the tenant is an operator.

        what: the refused action, such as "see the server's statistics".
        """
        if not self.rights.operator:
            raise PermissionDeniedError(
                f"tenant {self.tenant!r} may not {what}: {self.right_line('operator')}"
            )

    def right_line(self, right: str, names: Names | None = None) -> str:
        """Return the end of an error: the line that an operator writes for a right.

        names: what the right should apply to; None: it has no names.
        """
        value = "true"
        if names is not None:
            value = '"all"' if names == ALL else json.dumps(names.patterns, ensure_ascii=False)
        return (
            f"it lacks the right {right!r}; the operator writes {right} = {value} below "
            f"{tenant_table(self.tenant)} in api_keys_file"
        )


LOCAL = Principal()
