"""How large a share of the engine a request's adapters or tenant have, as the operator says it."""

from collections.abc import Iterable, Mapping


def share_weight(
    fair_share: str,
    weights: Mapping[str, float],
    *,
    adapters: Iterable[str],
    tenant: str,
    tenant_weight: float | None = None,
) -> float:
    """fair_share and weights are the settings fair_share and fair_weights; a name without a weight
    has 1. Of several adapters the smallest counts; by tenant and adapter, the product. What is
    written beside the tenant's keys (tenant_weight) goes before the setting.
    """
    by_adapter = min((weights.get(name, 1.0) for name in adapters), default=1.0)
    by_tenant = weights.get(tenant, 1.0) if tenant_weight is None else tenant_weight
    match fair_share:
        case "adapter":
            return by_adapter
        case "tenant":
            return by_tenant
        case "tenant_adapter":
            return by_adapter * by_tenant
        case _:
            return 1.0
