"""A server's load in the header of an answer, for gateways that spread requests by it.

A client asks with `endpoint-load-metrics-format: text` or `json`. Form: Open Request Cost
Aggregation (ORCA) of the xDS project, with the two named metrics that Triton reports.
"""

from collections.abc import Mapping

import msgspec

from loraplex.core.errors import ModelNotFoundError
from loraplex.frontends.kserve.service import TritonService

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


def load_headers(service: TritonService, headers: Mapping[str, str], model: str) -> dict[str, str]:
    """Empty if the client does not ask, or asks for another form."""
    asked = headers.get(REQUEST_HEADER)
    if asked is None:
        return {}
    form = asked.strip().lower()
    if form not in ("text", "json"):
        return {}
    try:
        named = _named_metrics(service, model)
    except ModelNotFoundError:  # unloaded while it answered
        return {}
    if form == "json":
        return {RESPONSE_HEADER: "JSON " + msgspec.json.encode({"named_metrics": named}).decode()}
    pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
    return {RESPONSE_HEADER: f"TEXT {pairs}"}


def _named_metrics(service: TritonService, model: str) -> dict[str, float]:
    """Share of the KV blocks in use, 0 to 1, and how many tokens all blocks hold."""
    card = service.catalog.find(model).card
    stats = service.backend.model(card.name).stats
    num_blocks = stats.blocks_held + stats.blocks_cached + stats.blocks_free
    return {
        "kv_cache_utilization": stats.kv_usage,
        "max_token_capacity": num_blocks * card.kv_block_size,
    }
