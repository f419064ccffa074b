"""A page of the items of a conversation, by OpenAI's list parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.input_items import Item

MAX_LISTED: Final = 100
DEFAULT_LISTED: Final = 20
LIMIT: Final[Mapping[str, Any]] = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}
ORDERS: Final[Mapping[str, Any]] = {"type": "string", "enum": ["asc", "desc"]}


def page(items: Sequence[Item], query: Mapping[str, str]) -> wire.ItemList:
    """OpenAI's paging: newest first unless `order` is asc; `limit` items after the id `after`."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidParameterError(f"order must be asc or desc, got {order[:64]!r}", param="order")
    limit = query.get("limit", str(DEFAULT_LISTED))
    if limit not in map(str, range(1, MAX_LISTED + 1)):
        raise InvalidParameterError(
            f"limit must be in [1, {MAX_LISTED}], got {limit[:64]!r}", param="limit"
        )
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidParameterError(f"after: there is no item {after[:80]!r}", param="after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: int(limit)]
    return wire.ItemList(
        data=list(shown),
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(ordered) > len(shown),
    )
