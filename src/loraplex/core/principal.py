"""Who is asking: the tenant, what it may do, and how much."""

import msgspec

DEFAULT_TENANT = "default"


class TenantLimits(msgspec.Struct, frozen=True):
    """None means no limit of the tenant's own."""

    max_concurrent_requests: int | None = None


class Principal(msgspec.Struct, frozen=True):
    """An argument of every serving call. Without API keys there is one: `LOCAL`."""

    tenant: str = DEFAULT_TENANT
    may_use_adapters: bool = True
    may_manage_adapters: bool = True
    limits: TenantLimits = TenantLimits()


LOCAL = Principal()
